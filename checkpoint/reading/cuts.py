"""Cuts: which bytes of a chunk hold a wanted box, in whole checksum blocks.

Pure geometry, counted from the first byte of the chunk, so that one answer serves every chunk of
the same sizes wherever it lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...dtensor.geometry.box import Box, row_major_strides
from . import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Elements of a chunk that are stored in one go. Bytes count from the chunk's first one."""

    low: int
    """First byte of the whole blocks that hold the elements."""
    high: int
    """One past the last byte of these blocks."""
    start: int
    """First byte of the first element."""
    end: int
    """One past the last byte of the last element."""
    target: int | None
    """First byte in the wanted box of a run, which is contiguous both there and in the chunk."""
    part: Box
    """The elements in the coordinates of the wanted box; of a run, those it is taken from."""
    strides: tuple[int, ...]
    """Bytes between neighbours in the chunk, in every dim."""
    is_in_place: bool
    """Whether the blocks can be read straight to where they belong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A wanted box of a tensor and a chunk that it meets."""

    chunk: Box
    wanted: Box
    itemsize: int
    block_bytes: int
    staged_bytes: int
    """Most bytes that are read in one go through a buffer."""
    strides: tuple[int, ...] | None = None
    """Bytes between neighbours in the chunk, in every dim; None where it is row-major."""

    def cuts(self, *, runs: bool) -> Iterator[Cut]:
        """Yield cuts of about READ_BYTES or ``staged_bytes`` that make up the common elements.

        Without ``runs`` every cut is a part with strides, for destinations that are no memory.
        """
        common = self.chunk.intersect(self.wanted)
        if common is None:
            return
        if self.strides is not None:
            yield from self._cuts_of_view(common, self.strides)
            return
        strides = tuple(s * self.itemsize for s in row_major_strides(self.chunk.sizes))
        for part in self._without_wide_gaps(common, strides):
            is_run = _is_contiguous(part.sizes, self.chunk.sizes) and _is_contiguous(
                part.sizes, self.wanted.sizes
            )
            if runs and is_run:
                yield from self._cut_run(part, strides)
            else:
                yield from self._cut_box(part, strides)

    def _cuts_of_view(self, common: Box, strides: tuple[int, ...]) -> Iterator[Cut]:
        """Yield the cuts of a chunk whose elements lie in another order, with the dims in theirs.

        Transposed, with gaps between them, or one element in the place of many.
        """
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        back = sorted(range(len(order)), key=order.__getitem__)
        ordered = replace(
            self, chunk=_permuted(self.chunk, order), wanted=_permuted(self.wanted, order)
        )
        wide_first = _picked(strides, order)
        for part in ordered._without_wide_gaps(_permuted(common, order), wide_first):
            for cut in ordered._cut_box(part, wide_first):
                yield replace(
                    cut, part=_permuted(cut.part, back), strides=_picked(cut.strides, back)
                )

    def _without_wide_gaps(self, box: Box, strides: tuple[int, ...]) -> Iterator[Box]:
        widest = max(self.block_bytes, limits.STEP_BYTES)
        return _without_wide_gaps(box, strides, widest, self.itemsize)

    def _cut_run(self, part: Box, strides: tuple[int, ...]) -> Iterator[Cut]:
        """Yield the whole blocks of a run apart from those that it shares with others."""
        start, end = self._span(part, strides)
        in_wanted = row_major_strides(self.wanted.sizes)
        at = zip(part.offsets, self.wanted.offsets, in_wanted, strict=True)
        target = sum((o - w) * s for o, w, s in at) * self.itemsize - start
        block = self.block_bytes
        low, high = -(-start // block) * block, end // block * block
        if end == self._chunk_bytes:
            high = end  # the last block may be short
        edges = [start, end]
        if low < high and end - start >= limits.IN_PLACE_BYTES:
            step = max(limits.READ_BYTES // block, 1) * block
            edges = sorted({start, *range(low, high, step), high, end})
        for a, b in itertools.pairwise(edges):
            yield self._cut(a, b, a + target, part, strides)

    def _cut_box(self, part: Box, strides: tuple[int, ...]) -> Iterator[Cut]:
        start, end = self._span(part, strides)
        most = max(self.staged_bytes - 2 * self.block_bytes, self.block_bytes)
        if part.numel > 1 and end - start > most:
            for half in part.halves():
                yield from self._cut_box(half, strides)
        else:
            yield self._cut(start, end, None, part, strides)

    def _cut(
        self, start: int, end: int, target: int | None, part: Box, strides: tuple[int, ...]
    ) -> Cut:
        block = self.block_bytes
        low = start // block * block
        high = -(-end // block) * block
        if self.strides is None:
            high = min(high, self._chunk_bytes)
        is_whole = (low, high) == (start, end)
        return Cut(
            low=low,
            high=high,
            start=start,
            end=end,
            target=target,
            part=part.relative_to(self.wanted),
            strides=strides,
            is_in_place=is_whole and target is not None and end - start >= limits.IN_PLACE_BYTES,
        )

    @property
    def _chunk_bytes(self) -> int:
        return self.chunk.numel * self.itemsize

    def _span(self, part: Box, strides: tuple[int, ...]) -> tuple[int, int]:
        """Return the bytes of the chunk from the first to past the last element."""
        at = zip(part.offsets, self.chunk.offsets, strides, strict=True)
        start = sum((o - c) * s for o, c, s in at)
        return start, start + _reach(part.sizes, strides) + self.itemsize


def run_cut(start: int, end: int, block_bytes: int, chunk_bytes: int) -> Cut:
    """Return the cut of some bytes of a chunk that are wanted as they lie there."""
    low = start // block_bytes * block_bytes
    high = min(-(-end // block_bytes) * block_bytes, chunk_bytes)
    return Cut(
        low=low,
        high=high,
        start=start,
        end=end,
        target=0,
        part=Box((0,), (end - start,)),
        strides=(1,),
        is_in_place=(low, high) == (start, end),
    )


def _picked(values: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[dim] for dim in order)


def _permuted(box: Box, order: Sequence[int]) -> Box:
    return Box(_picked(box.offsets, order), _picked(box.sizes, order))


def _reach(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def _is_contiguous(sizes: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether a box of some sizes is one run in a row-major array.

    >>> _is_contiguous((1, 2, 5), (3, 4, 5)), _is_contiguous((2, 2, 5), (3, 4, 5))
    (True, False)
    """
    dim = len(sizes) - 1
    while dim >= 0 and sizes[dim] == full[dim]:
        dim -= 1
    return all(size == 1 for size in sizes[: max(dim, 0)])


def _without_wide_gaps(
    box: Box, strides: tuple[int, ...], block_bytes: int, itemsize: int
) -> Iterator[Box]:
    """Yield parts in which neighbours lie less than a block apart, so that no block is in vain.

    Of small blocks some are: that costs less than a part for each (``limits.STEP_BYTES``).

    >>> [str(part) for part in _without_wide_gaps(Box((0, 0), (2, 3)), (80, 4), 64, 4)]
    ['[0:1,0:3]', '[1:2,0:3]']
    """
    cut = 0
    for dim, (size, stride) in enumerate(zip(box.sizes, strides, strict=True)):
        inner = _reach(box.sizes[dim + 1 :], strides[dim + 1 :]) + itemsize
        if size > 1 and stride - inner >= block_bytes:
            cut = dim + 1
    if cut == 0:
        yield box
        return
    spans = zip(box.offsets[:cut], box.sizes[:cut], strict=True)
    for index in itertools.product(*(range(o, o + n) for o, n in spans)):
        yield Box((*index, *box.offsets[cut:]), ((1,) * cut + box.sizes[cut:]))
