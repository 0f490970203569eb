"""Boxes of a source that hold what a copy takes of it."""

from __future__ import annotations

from collections.abc import Iterator

from ...dtensor.geometry.box import Box, row_major_strides
from .copies import Copy, Loop, simplified, steps_of
from .digits import Aligned, Misfit, Side, aligned, by_source, chain_of


def source_boxes(
    copy: Copy, shape: tuple[int, ...], most_skipped: int = 0
) -> Iterator[tuple[Box, Copy]]:
    """Yield boxes of the source, of some shape, with the copy of each into the target.

    The source of these copies is the box. Where steps leave gaps of at most ``most_skipped``
    elements the box has those, too.

    >>> even = Copy(source="w", loops=(Loop(4, 1, 2),))
    >>> [str(box) for box, _ in source_boxes(even, (8,))]
    ['[0:1]', '[2:3]', '[4:5]', '[6:7]']
    >>> [str(box) for box, _ in source_boxes(even, (8,), 1)]
    ['[0:7]']
    """
    strides = row_major_strides(shape)
    cut = [stride for stride, size in zip(strides, shape, strict=True) if size > 1]
    chain = chain_of([*cut, *(loop.of for loop in copy.loops)])
    if isinstance(chain, Misfit):
        fitting = [(loop.size, i) for i, loop in enumerate(copy.loops) if loop.of in chain]
        for step in steps_of(copy, min(fitting)[1]):
            yield from source_boxes(step, shape, most_skipped)
        return
    for part in aligned(copy.source_start, copy.start, by_source(copy), chain):
        yield from _boxes(part, copy.source, shape, strides, most_skipped)


def _boxes(
    part: Aligned,
    source: str | None,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    most_skipped: int,
) -> Iterator[tuple[Box, Copy]]:
    offsets, sizes = list[int](), list[int]()
    found: list[list[Side]] = []
    for size, stride in zip(shape, strides, strict=True):
        offsets.append(part.start // stride % size)
        inside = sorted(s for s in part.ranges if stride <= s < stride * size)
        loops = [Side(part.ranges[s][0], s // stride, part.ranges[s][1]) for s in inside]
        span = 1
        for place, loop in zip(inside, loops, strict=True):
            if (loop.stride - span) * stride > most_skipped:
                yield from _box_of_each(part, place, source, shape, strides, most_skipped)
                return
            span += (loop.size - 1) * loop.stride
        sizes.append(span)
        found.append(loops)
    box = Box(tuple(offsets), tuple(sizes))
    made = [Loop(size, other, 0) for size, other in part.repeats]
    for loops, stride in zip(found, row_major_strides(box.sizes), strict=True):
        made += [Loop(loop.size, loop.other, loop.stride * stride) for loop in loops]
    yield box, simplified(Copy(source=source, start=part.other, loops=tuple(made)))


def _box_of_each(
    part: Aligned,
    place: int,
    source: str | None,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    most_skipped: int,
) -> Iterator[tuple[Box, Copy]]:
    """Yield the boxes of every value of a digit by itself."""
    size, other = part.ranges[place]
    ranges = {stride: taken for stride, taken in part.ranges.items() if stride != place}
    for i in range(size):
        one = part._replace(start=part.start + i * place, other=part.other + i * other)
        yield from _boxes(one._replace(ranges=ranges), source, shape, strides, most_skipped)
