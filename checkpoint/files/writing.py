"""Writing one rank's data file: bytes in, checksums in the same pass, one stream out.

Memory is bounded whatever the size of the file. A stream that takes aligned pieces without another
copy (direct I/O) is fed from a few aligned buffers by a thread of its own, so that copying and
hashing go on while the device writes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from dtckpt.errors import CheckpointError

from ...dtensor.geometry.box import Box
from ...storage.base import Store, WriteStream
from ..state.collector import paused_collector
from ..tensors.dtypes import DType
from ..tensors.source import PIECE_BYTES, Source
from .blocks import DEFAULT_BLOCK_BYTES, BlockHasher, digest
from .buffers import BUFFER_BYTES, borrowed_buffers
from .datafile import FileLayout, lay_out
from .encoding import BlockEncoder, OnEncoded
from .manifest import FileRecord, data_path
from .stored_tensor import StoredTensor

_SMALL_BYTES = 1 << 18
_COPY_BYTES = 1 << 20
"""Bytes that are hashed and then copied while they are in the processor's cache."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor that is to be written, and where its bytes are."""

    tensor: StoredTensor
    box: Box
    source: Source

    @property
    def key(self) -> str:
        """Key in the data file."""
        return self.tensor.key(self.box)

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.tensor.dtype

    @property
    def num_bytes(self) -> int:
        """Length in the data region."""
        return self.box.numel * self.dtype.itemsize


def in_file_order(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return chunks as they lie in a data file: wide element types first."""
    return sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a data file is to hold."""

    chunks: Iterable[Chunk]
    image: memoryview | None = None
    """Memory in which the pieces of all chunks lie back to back in file order, as staging leaves
    them, starting at a page."""
    references: Mapping[str, str] = field(default_factory=dict[str, str])
    """Which other file holds a chunk that is not written, by key."""


def write_file(
    store: Store,
    contents: Contents,
    *,
    save_id: str,
    rank: int,
    on_progress: Progress = lambda _: None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    is_compressed: bool = False,
    on_encoded: OnEncoded = lambda _seconds, _num_bytes: None,
) -> FileRecord | None:
    """Write all chunks of a rank as one durable data file; None where there is nothing to say.

    ``on_progress`` is called with the number of bytes after each piece, and stops the writing by
    raising; ``on_encoded`` at the end of a compressed file with the seconds for which writing has
    waited for the codec, and the bytes that this was given. Raises what the store raises; nothing
    is visible under the file's name then.
    """
    ordered = in_file_order(contents.chunks)
    if not ordered and not contents.references:
        return None
    with paused_collector():
        layout, header = lay_out(
            ((chunk.key, chunk.dtype, chunk.box.sizes) for chunk in ordered),
            save_id=save_id,
            references=contents.references,
            block_bytes=block_bytes,
            is_compressed=is_compressed,
        )
    with store.create(data_path(save_id, rank, is_compressed=is_compressed), layout.size) as stream:
        with _output(stream, None if is_compressed else contents.image, layout) as output:
            output.begin(header)
            if is_compressed:
                table = _encode(ordered, layout, output, on_progress, on_encoded)
            else:
                table = _hash(ordered, layout, output, on_progress)
            output.end(table)
        if is_compressed:
            stream.shorten()
    return FileRecord(
        rank=rank,
        size=stream.size,
        header_bytes=layout.data_start,
        data_bytes=layout.data_bytes,
        stored_bytes=stream.size - layout.data_start - len(table) if is_compressed else None,
        header_digest=digest(header).hex(),
        table_digest=digest(table).hex(),
    )


def _hash(
    chunks: Iterable[Chunk], layout: FileLayout, output: _Output, on_progress: Progress
) -> bytes:
    """Write chunks as they are, and return the table of their blocks."""
    hasher = BlockHasher(layout.block_bytes)
    for chunk in chunks:
        for piece in chunk.source.pieces(PIECE_BYTES):
            output.put(piece, hasher)
            on_progress(len(piece))
        hasher.end_chunk()
    return hasher.table()


def _encode(
    chunks: Iterable[Chunk],
    layout: FileLayout,
    output: _Output,
    on_progress: Progress,
    on_encoded: OnEncoded,
) -> bytes:
    """Write chunks compressed, and return the table of their blocks."""
    with BlockEncoder(layout.block_bytes, output.put) as encoder:
        for chunk in chunks:
            for piece in chunk.source.pieces(PIECE_BYTES):
                encoder.update(piece, chunk.dtype.in_file.itemsize)
                on_progress(len(piece))
            encoder.end_chunk()
        encoder.finish()
    if encoder.num_bytes != layout.data_bytes:  # which no store can find by the size of the file
        raise CheckpointError(
            f"the chunks of a data file were to have {layout.data_bytes} bytes, and have "
            f"{encoder.num_bytes}"
        )
    on_encoded(encoder.waited_seconds, encoder.num_bytes)
    return encoder.table()


class _Output(Protocol):
    """How bytes get to the stream."""

    def begin(self, header: bytes) -> None: ...
    def put(self, piece: memoryview, hasher: BlockHasher | None = None) -> None: ...
    def end(self, table: bytes) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def _output(stream: WriteStream, image: memoryview | None, layout: FileLayout) -> _Output:
    if stream.alignment == 1:
        return _Plain(stream)
    if image is not None:
        return _FromImage(stream, image[: layout.data_bytes])
    return _Buffered(stream)


class _Plain(_Output):
    """Hands pieces on as they are; small ones are gathered into larger writes."""

    def __init__(self, stream: WriteStream) -> None:
        self._stream = stream
        self._small = bytearray()

    def begin(self, header: bytes) -> None:
        self._stream.write(header)

    def put(self, piece: memoryview, hasher: BlockHasher | None = None) -> None:
        if hasher is not None:
            hasher.update(piece)
        if len(piece) < _SMALL_BYTES:
            self._small += piece
            if len(self._small) >= _SMALL_BYTES:
                self._flush()
            return
        self._flush()
        self._stream.write(piece)

    def _flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._stream.write(small)

    def end(self, table: bytes) -> None:
        self._flush()
        self._stream.write(table)


class _Buffered(_Output):
    """Copies pieces into aligned buffers, which a thread writes while the next one fills."""

    def __init__(self, stream: WriteStream) -> None:
        self._borrowed = borrowed_buffers()
        self._stream = stream
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._filled = 0

    def __enter__(self) -> Self:
        for buffer in self._borrowed.__enter__():
            self._free.put(buffer)
        self._writer = _Writer(self._stream)
        self._take()
        return self

    def _take(self) -> None:
        self._buffer = self._writer.wait_for(self._free)
        self._items: Any = np.frombuffer(self._buffer, dtype=np.uint8)
        self._filled = 0

    def begin(self, header: bytes) -> None:
        self._copy(np.frombuffer(header, dtype=np.uint8))

    def put(self, piece: memoryview, hasher: BlockHasher | None = None) -> None:
        end = self._filled + len(piece)
        if len(piece) < _SMALL_BYTES and end < BUFFER_BYTES:
            if hasher is not None:
                hasher.update(piece)
            self._buffer[self._filled : end] = piece
            self._filled = end
            return
        items = np.frombuffer(piece, dtype=np.uint8)
        for start in range(0, len(piece), _COPY_BYTES):
            if hasher is not None:
                hasher.update(piece[start : start + _COPY_BYTES])
            self._copy(items[start : start + _COPY_BYTES])

    def _copy(self, items: Any) -> None:
        while len(items):
            room = BUFFER_BYTES - self._filled
            part, items = items[:room], items[room:]
            np.copyto(self._items[self._filled : self._filled + len(part)], part)
            self._filled += len(part)
            if self._filled == BUFFER_BYTES:
                self._writer.write(self._buffer, self._free)
                self._take()

    def end(self, table: bytes) -> None:
        self._copy(np.frombuffer(table, dtype=np.uint8))
        self._writer.write(self._buffer[: self._filled], None)
        self._writer.finish()

    def __exit__(self, *exc: object) -> None:
        self._writer.stop()
        self._buffer = memoryview(b"")
        self._items = None
        self._free = queue.SimpleQueue()
        self._borrowed.__exit__(None, None, None)


class _FromImage(_Output):
    """Writes memory that is laid out as the file is, a few pieces behind the hashing of it."""

    def __init__(self, stream: WriteStream, image: memoryview) -> None:
        self._stream = stream
        self._image = image
        self._writer = _Writer(stream)
        self._hashed = 0
        self._written = 0

    def begin(self, header: bytes) -> None:
        with borrowed_buffers(-(-len(header) // BUFFER_BYTES)) as buffers:
            for start, buffer in zip(range(0, len(header), BUFFER_BYTES), buffers, strict=True):
                part = header[start : start + BUFFER_BYTES]
                buffer[: len(part)] = part
                self._stream.write(buffer[: len(part)])

    def put(self, piece: memoryview, hasher: BlockHasher | None = None) -> None:
        if hasher is not None:
            hasher.update(piece)
        self._hashed += len(piece)
        while self._hashed - self._written >= BUFFER_BYTES:
            self._write(self._written + BUFFER_BYTES)

    def _write(self, end: int) -> None:
        self._writer.write(self._image[self._written : end], None)
        self._written = end

    def end(self, table: bytes) -> None:
        self._write(self._hashed)
        self._writer.write(memoryview(table), None)
        self._writer.finish()

    def __exit__(self, *exc: object) -> None:
        self._writer.stop()


_Job = tuple[memoryview, "queue.SimpleQueue[memoryview] | None"]


class _Writer:
    """A thread that writes to a stream. Its failure is raised in the thread that feeds it.

    No executor: they refuse work while the interpreter ends, when a save may still be under way.
    Where no thread can be started, which may be so then, too, the thread that feeds it writes.
    """

    def __init__(self, stream: WriteStream) -> None:
        self._stream = stream
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=2)
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="dtckpt-write", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)

    def _do(self, view: memoryview, give_back: queue.SimpleQueue[memoryview] | None) -> None:
        if self._failure is None:
            try:
                self._stream.write(view)
            except BaseException as error:
                self._failure = error
        if give_back is not None:
            give_back.put(view)

    def write(self, view: memoryview, give_back: queue.SimpleQueue[memoryview] | None) -> None:
        """Write a view, which goes back into a queue when it has been written."""
        self._check()
        if self._thread is None:
            self._do(view, give_back)
        else:
            self._jobs.put((view, give_back))

    def wait_for(self, free: queue.SimpleQueue[memoryview]) -> memoryview:
        """Return the next free buffer."""
        buffer = free.get()
        self._check()
        return buffer

    def finish(self) -> None:
        """Wait until everything is written."""
        self.stop()
        self._check()

    def stop(self) -> None:
        """End the thread after what it was given."""
        if self._thread is not None and self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
