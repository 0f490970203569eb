"""Planning reads: wanted boxes to exact ranges of whole blocks, merged and bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ..files.datafile import Entry
from ..files.stored_data import DataFile, StoredData
from ..files.stored_tensor import StoredTensor
from ..tensors.sink import Array, EarlySink
from . import limits
from .cuts import Cut, Geometry, run_cut
from .wants import ArraySink, Fill, MemorySink, Want, stored_wants

_Stored = int | tuple[int, ...]


class Extent(NamedTuple):
    """Elements of one chunk that are stored in one go. A tuple, because there are so many."""

    start: int
    """First byte of its blocks in the data region."""
    end: int
    cut: Cut
    entry: Entry
    want: Want


class Range(NamedTuple):
    """Bytes of the data region that are read into a buffer, and what is taken out of it."""

    start: int
    end: int
    extents: list[Extent]
    """By their first byte; their blocks may overlap."""

    @property
    def has_gaps(self) -> bool:
        """Whether there are bytes that are read over, and so never verified."""
        end = self.start
        for extent in self.extents:
            if extent.start > end:
                return True
            end = max(end, extent.end)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What is read from a file in one go: at most about READ_BYTES."""

    file: DataFile
    in_place: tuple[Extent, ...]
    """Whole blocks that go straight to their destination."""
    ranges: tuple[Range, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        in_place = sum(extent.end - extent.start for extent in self.in_place)
        return in_place + sum(r.end - r.start for r in self.ranges)


def plan_reads(data: StoredData, wants: Iterable[Want]) -> list[Read | Fill]:
    """Return reads that bring exactly the wanted elements, by file and offset.

    Where tensors have a recipe those are read that they are made of.

    Raises Corrupt or LayoutMismatch unless the stored chunks cover every wanted box exactly;
    all files are checked here, before any element is read.
    """
    chunks = _Chunks(data)
    early: dict[DataFile, list[Extent]] = {}
    late: dict[DataFile, list[Extent]] = {}
    reads: list[Read | Fill] = []
    met = _met(chunks, stored_wants(wants), reads)
    while together := tuple(islice(met, limits.NUM_OPENED_FOR)):
        data.open_for((cell.rank, key, want.tensor.name) for want, cell, key in together)
        for want, cell, key in together:
            extents = early if isinstance(want.sink, EarlySink) else late
            file, entry = data.find(cell.rank, want.tensor, key, cell.shape)
            found = extents.get(file)
            if found is None:
                found = extents[file] = []
            start = entry.start
            for cut in cell.cuts(file, entry.strides):
                found.append(Extent(start + cut.low, start + cut.high, cut, entry, want))
    for extents in (early, late):
        for file in sorted(extents, key=lambda file: file.name):
            reads += _merge(file, extents[file])
    return reads


def _met(
    chunks: _Chunks, wants: Iterable[Want | Fill], reads: list[Read | Fill]
) -> Iterator[tuple[Want, _Cell, str]]:
    """Yield what wants meet, with its key; fills are put among the reads."""
    for want in wants:
        if isinstance(want, Fill):
            reads.append(want)
            continue
        name = want.tensor.stored_name
        for cell in chunks.meeting(want):
            yield want, cell, name + cell.suffix


class Run(NamedTuple):
    """Bytes of a stored chunk that are wanted as they lie there, one after the other."""

    tensor: StoredTensor
    writer: int
    """The rank in whose data file the chunk is."""
    chunk: Box
    start: int
    """Bytes of the chunk before them."""
    boxes: Sequence[tuple[Box, Array]]
    """The same elements as boxes, each with where in ``memory`` it is."""
    memory: memoryview


def plan_runs(data: StoredData, runs: Iterable[Run]) -> list[Read | Fill]:
    """Return reads that bring the bytes of some runs into their memory.

    Raises Corrupt where a file or a chunk is not what it must be.
    """
    found: dict[DataFile, list[Extent]] = {}
    others: list[Want] = []
    for run in runs:
        file, entry = data.entry(run.writer, run.tensor, run.chunk)
        if entry.strides is not None:  # its elements do not lie one after the other
            others += [
                Want(tensor=run.tensor, box=box, sink=ArraySink(array)) for box, array in run.boxes
            ]
            continue
        whole = Box((0,), (len(run.memory),))
        want = Want(tensor=run.tensor, box=whole, sink=MemorySink(run.memory))
        end = run.start + len(run.memory)
        cut = run_cut(run.start, end, file.layout.block_bytes, entry.num_bytes)
        extent = Extent(entry.start + cut.low, entry.start + cut.high, cut, entry, want)
        found.setdefault(file, []).append(extent)
    reads = plan_reads(data, others) if others else []
    for file in sorted(found, key=lambda file: file.name):
        reads += _merge(file, found[file])
    return reads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A chunk that a wanted box meets, without the name of the tensor."""

    rank: int
    chunk: Box
    wanted: Box
    suffix: str
    """What follows the stored name in the key."""
    shape: tuple[int, ...]
    """As the header states it."""
    itemsize: int
    runs: bool
    """Whether the destination is memory."""
    known: dict[_Stored, tuple[Cut, ...]] = field(default_factory=dict["_Stored", tuple[Cut, ...]])

    def cuts(self, file: DataFile, strides: tuple[int, ...] | None) -> tuple[Cut, ...]:
        """Return the cuts of the common elements, given how they are stored in a file.

        All files with blocks of one length are in stores of one kind.
        """
        block_bytes = file.layout.block_bytes
        stored = block_bytes if strides is None else strides  # with strides blocks are bytes
        cuts = self.known.get(stored)
        if cuts is None:
            geometry = Geometry(
                chunk=self.chunk,
                wanted=self.wanted,
                itemsize=self.itemsize,
                block_bytes=block_bytes,
                staged_bytes=limits.staged_bytes(file.store, block_bytes),
                strides=strides,
            )
            cuts = self.known[stored] = tuple(geometry.cuts(runs=self.runs))
        return cuts


class _Chunks:
    """The chunks that wanted boxes meet; tensors of one layout share the answers."""

    def __init__(self, data: StoredData) -> None:
        self._data = data
        self._known: dict[tuple[object, ...], list[_Cell]] = {}
        self._layouts: list[object] = []  # kept, so that no id is used twice

    def meeting(self, want: Want) -> Iterable[_Cell]:
        """Yield them; LayoutMismatch at the end unless they cover the box exactly.

        One by one, so that whoever asks for some of their files does not learn of the millions that
        a forged manifest may state, but fails at the first one that is not there.
        """
        tensor, box = want.tensor, want.box
        if 0 in box.sizes:
            return []
        runs = want.sink.is_memory
        rule = (id(tensor.layout), tensor.writers, tensor.cut)
        key = (rule, tensor.dtype.code, box.offsets, box.sizes, runs)
        return self._known.get(key) or self._find(key, tensor, box, runs=runs)

    def _find(
        self, key: tuple[object, ...], tensor: StoredTensor, box: Box, *, runs: bool
    ) -> Iterator[_Cell]:
        cells: list[_Cell] = []
        covered = 0
        for rank, chunk, common in tensor.chunks_meeting(box):
            covered += common.numel
            cell = _Cell(
                rank=rank,
                chunk=chunk,
                wanted=box,
                suffix=tensor.key(chunk)[len(tensor.stored_name) :],
                shape=tensor.dtype.file_shape(chunk.sizes),
                itemsize=tensor.dtype.itemsize,
                runs=runs,
            )
            cells.append(cell)
            yield cell
        if covered != box.numel:
            raise LayoutMismatch(
                f"{self._data.store.url}: the stored chunks of tensor {tensor.name!r} hold "
                f"{covered} of the {box.numel} elements of {box}"
            )
        self._layouts.append(tensor.layout)
        self._known[key] = cells


def _merge(file: DataFile, extents: list[Extent]) -> Iterator[Read]:
    """Yield reads of neighbouring extents, bounded in size."""
    extents.sort(key=attrgetter("start", "end"))
    builder = _Builder(file)
    for extent in extents:
        if builder.is_full(extent):
            yield builder.build()
            builder = _Builder(file)
        builder.add(extent)
    if extents:
        yield builder.build()


class _Builder:
    """A read that grows; extents come by their first byte."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._in_place: list[Extent] = []
        self._ranges: list[Range] = []
        self._members: list[Extent] = []
        """Pieces of the range that still grows."""
        self._start = 0
        self._end = 0
        self._num_bytes = 0
        self._gap_bytes = 0
        self._staged_bytes = limits.staged_bytes(file.store, file.layout.block_bytes)

    def is_full(self, extent: Extent) -> bool:
        """Whether the read has something and no room for ``extent``."""
        most = limits.READ_BYTES if extent.cut.is_in_place else self._staged_bytes
        return self._num_bytes > 0 and self._num_bytes + extent.end - extent.start > most

    def add(self, extent: Extent) -> None:
        """Take an extent."""
        start, end, cut, *_ = extent
        if cut.is_in_place:
            self._in_place.append(extent)
            self._num_bytes += end - start
            return
        gap = start - self._end
        if not self._members or (gap > limits.PAGE_BYTES and not self._may_read_over(gap)):
            self._close_range()
            self._start = self._end = start
        elif gap > 0:
            self._gap_bytes += gap
        self._members.append(extent)
        if end > self._end:
            self._num_bytes += end - self._end
            self._end = end

    def _may_read_over(self, gap: int) -> bool:
        wanted = self._num_bytes - self._gap_bytes
        return gap <= limits.GAP_BYTES and 8 * (self._gap_bytes + gap) <= wanted

    def _close_range(self) -> None:
        if self._members:
            self._ranges.append(Range(self._start, self._end, self._members))
            self._members = []

    def build(self) -> Read:
        """Return the read."""
        self._close_range()
        return Read(file=self._file, in_place=tuple(self._in_place), ranges=tuple(self._ranges))
