"""Reading boxes of stored tensors: plan exact block ranges, then read, verify and scatter.

Planning turns every wanted box into *pieces*, parts of one chunk whose bytes span a bounded range
of the file, and merges the ranges of neighbouring pieces into *reads* of whole blocks. Executing
reads each range once, verifies every block of it, and copies the pieces out with NumPy strides, so
no copy is larger than a read. Nothing here imports torch: elements are moved as opaque items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dtckpt.errors import Corrupt, LayoutMismatch

from ..dtensor.box import Box, row_major_strides
from ..storage.base import ReadRequest, Store
from .blocks import digest
from .datafile import Entry, FileLayout
from .plan import StoredTensor
from .stored import DataFile, StoredData

Array = np.ndarray[Any, Any]

MAX_READ_BYTES = 16 << 20
NUM_READERS = 4
"""Reads in flight; with MAX_READ_BYTES this bounds the memory of a load."""


class Sink(Protocol):
    """Where wanted elements go."""

    def put(self, part: Box, items: Array) -> None:
        """Store ``items``, of unsigned ints as wide as an element, at ``part`` of the wanted box.

        Called from several threads at once, for disjoint parts; ``items`` is valid only during
        the call.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A box of a stored tensor and where its elements go."""

    tensor: StoredTensor
    box: Box
    sink: Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of one chunk that are copied in one go."""

    want: Want
    entry: Entry
    chunk: Box
    in_chunk: Box
    in_want: Box
    start: int
    """First byte of the span in the data region."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A range of whole blocks of one file and what is copied out of it."""

    file: DataFile
    first_block: int
    end_block: int
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """First byte in the data region."""
        return self.first_block * self.file.layout.block_bytes

    @property
    def num_bytes(self) -> int:
        """Length of the range; the last block of a file may be short."""
        end = min(self.end_block * self.file.layout.block_bytes, self.file.layout.data_bytes)
        return end - self.start


def plan_reads(data: StoredData, wants: Iterable[Want]) -> list[Read]:
    """Return reads that bring exactly the wanted elements.

    Raises Corrupt or LayoutMismatch unless the stored chunks cover every wanted box exactly;
    all files are checked here, before any element is read.
    """
    pieces: dict[DataFile, list[Piece]] = {}
    for want in wants:
        for file, piece in _pieces(data, want):
            pieces.setdefault(file, []).append(piece)
    return [read for file, found in pieces.items() for read in _merge(file, found)]


def _pieces(data: StoredData, want: Want) -> Iterator[tuple[DataFile, Piece]]:
    tensor, covered = want.tensor, 0
    for rank, chunk, common in tensor.chunks_meeting(want.box):
        file, entry = data.entry(rank, tensor, chunk)
        covered += common.numel
        for part in _split(common.relative_to(chunk), chunk, entry, file.layout):
            in_want = part.translate(chunk.offsets).relative_to(want.box)
            start, end = _span(part, chunk, entry)
            yield (
                file,
                Piece(
                    want=want,
                    entry=entry,
                    chunk=chunk,
                    in_chunk=part,
                    in_want=in_want,
                    start=start,
                    end=end,
                ),
            )
    if covered != want.box.numel:
        raise LayoutMismatch(
            f"{data.store.url}: the stored chunks of tensor {tensor.name!r} hold {covered} of "
            f"the {want.box.numel} elements of {want.box}"
        )


def _span(part: Box, chunk: Box, entry: Entry) -> tuple[int, int]:
    """Return the bytes of the data region from the first to past the last element."""
    strides = row_major_strides(chunk.sizes)
    first = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(part.sizes, strides, strict=True))
    size = entry.dtype.itemsize
    return entry.start + first * size, entry.start + (last + 1) * size


def _split(part: Box, chunk: Box, entry: Entry, layout: FileLayout) -> Iterator[Box]:
    """Yield parts with spans that fit into a read and do not skip whole blocks in vain.

    A span with gaps is halved until more than half of it is wanted or it is a block or two long.
    """
    start, end = _span(part, chunk, entry)
    wanted = part.numel * entry.dtype.itemsize
    dense = end - start <= max(2 * wanted, 2 * layout.block_bytes)
    if part.numel == 1 or (dense and end - start <= MAX_READ_BYTES - 2 * layout.block_bytes):
        yield part
        return
    for half in part.halves():
        yield from _split(half, chunk, entry, layout)


def _merge(file: DataFile, pieces: list[Piece]) -> Iterator[Read]:
    """Yield reads of neighbouring pieces, sorted by offset and bounded in size."""
    block_bytes = file.layout.block_bytes
    group: list[Piece] = []
    first = end = 0
    for piece in sorted(pieces, key=lambda p: (p.start, p.end)):
        piece_first, piece_end = piece.start // block_bytes, -(-piece.end // block_bytes)
        grown = max(end, piece_end)
        if group and (piece_first > end or (grown - first) * block_bytes > MAX_READ_BYTES):
            yield Read(file=file, first_block=first, end_block=end, pieces=tuple(group))
            group = []
        if not group:
            first, grown = piece_first, piece_end
        end = grown
        group.append(piece)
    if group:
        yield Read(file=file, first_block=first, end_block=end, pieces=tuple(group))


class ReadCache:
    """The last read of a caller that reads many small boxes, one after the other."""

    def __init__(self) -> None:
        self._last: tuple[Read, Array] | None = None

    def find(self, read: Read) -> Array | None:
        """Return the verified bytes of a read, if the last one held them."""
        if self._last is None:
            return None
        last, data = self._last
        if last.file is not read.file or last.start > read.start:
            return None
        part = data[read.start - last.start :][: read.num_bytes]
        return part if len(part) == read.num_bytes else None

    def keep(self, read: Read, data: Array) -> None:
        """Remember a read in place of the one before."""
        self._last = (read, data)


def execute(
    store: Store,
    reads: Sequence[Read],
    *,
    touched: dict[str, None] | None = None,
    cache: ReadCache | None = None,
) -> int:
    """Run reads in parallel and return the bytes read.

    Raises Corrupt at the first damaged block. ``touched`` collects the names of tensors of which
    elements were stored, also where the call fails.
    """
    touched = {} if touched is None else touched

    def run(read: Read) -> int:
        data = cache.find(read) if cache is not None else None
        num_bytes = 0 if data is not None else read.num_bytes
        if data is None:
            data = _fetch(store, read)
            if cache is not None:
                cache.keep(read, data)
        for piece in read.pieces:
            touched[piece.want.tensor.name] = None
            piece.want.sink.put(piece.in_want, _items(piece, data, read.start))
        return num_bytes

    if len(reads) == 1:
        return run(reads[0])
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="dtckpt-read") as pool:
        futures = [pool.submit(run, read) for read in reads]
        try:
            return sum(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _fetch(store: Store, read: Read) -> Array:
    """Return the bytes of a read, verified."""
    data = np.empty(read.num_bytes, dtype=np.uint8)
    offset = read.file.layout.data_start + read.start
    store.read_into(read.file.name, [ReadRequest(offset, data.data)])
    damaged = verify_blocks(read, data)
    if damaged:
        raise Corrupt("; ".join(map(str, damaged)))
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A block whose bytes are not those that were written."""

    file: DataFile
    start: int
    """First byte in the file."""
    end: int
    keys: tuple[str, ...]
    """Entries with bytes in the block."""

    def __str__(self) -> str:
        names = ", ".join(self.keys[:8]) + (" and others" if len(self.keys) > 8 else "")
        return (
            f"{self.file.where}: bytes {self.start} to {self.end} are damaged; "
            f"they belong to {names}"
        )


def verify_blocks(read: Read, data: Array) -> list[Damage]:
    """Return every block of a read that does not have its digest."""
    layout = read.file.layout
    view = data.data
    damaged: list[Damage] = []
    for block in range(read.first_block, read.end_block):
        start = block * layout.block_bytes - read.start
        if digest(view[start : start + layout.block_bytes]) == read.file.block_digest(block):
            continue
        low = block * layout.block_bytes
        high = min(low + layout.block_bytes, layout.data_bytes)
        damaged.append(
            Damage(
                file=read.file,
                start=layout.data_start + low,
                end=layout.data_start + high,
                keys=tuple(layout.keys_between(low, high)),
            )
        )
    return damaged


def _items(piece: Piece, data: Array, data_start: int) -> Array:
    """Return a strided view of a piece's elements in a buffer that starts at ``data_start``."""
    size = piece.entry.dtype.itemsize
    items = data[piece.start - data_start : piece.end - data_start].view(f"u{size}")
    strides = tuple(s * size for s in row_major_strides(piece.chunk.sizes))
    return np.lib.stride_tricks.as_strided(items, piece.in_chunk.sizes, strides, writeable=False)
