"""What copies have in common: copies by way of a tensor in between, and what is left of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dtckpt.errors import LayoutMismatch

from .copies import MOST_COPIES, Copy, Loop, simplified, steps_of, too_irregular
from .digits import Aligned, Misfit, aligned, by_source, by_target, chain_of, common


def through(outer: Copy, inner: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the copies that bring elements by way of the tensor that ``outer`` copies from.

    ``inner`` are those that make up that tensor. LayoutMismatch where the two fit together so
    badly that it would take more than MOST_COPIES.

    >>> from dtckpt.checkpoint.copies.copies import box_copy
    >>> from dtckpt.dtensor import Box
    >>> rows = box_copy("", Box((1, 0), (2, 3)), (4, 3))
    >>> [copy.source_start for copy in through(rows, [Copy.whole("w", (4, 3))])]
    [3]
    """
    count = 0
    for copy in inner:
        for found in _meeting(outer, copy):
            count += 1
            if count > MOST_COPIES:
                raise LayoutMismatch(too_irregular(copy.source))
            yield found


def meet(one: Copy, other: Copy) -> bool:
    """Whether two copies bring an element of one target."""
    return next(_meeting(one.inverse(), other), None) is not None


def _meeting(outer: Copy, inner: Copy) -> Iterator[Copy]:
    """Yield what ``outer`` takes of what ``inner`` brings."""
    if outer.source_end <= inner.start or inner.end <= outer.source_start:
        return
    if inner.is_run and inner.start <= outer.source_start and outer.source_end <= inner.end:
        start = outer.source_start + inner.source_start - inner.start
        yield replace(outer, source=inner.source, source_start=start)  # a part of a whole tensor
        return
    chain = chain_of([*(loop.of for loop in outer.loops), *(loop.to for loop in inner.loops)])
    if isinstance(chain, Misfit):
        yield from _unrolled(outer, inner, chain)
        return
    taken = list(aligned(outer.source_start, outer.start, by_source(outer), chain))
    brought = list(aligned(inner.start, inner.source_start, by_target(inner), chain))
    for one in taken:
        for other in brought:
            found = common(one, other, inner.source, chain)
            if found is not None:
                yield found


def _unrolled(outer: Copy, inner: Copy, misfit: Misfit) -> Iterator[Copy]:
    """Yield what the two have in common, with a loop that does not fit the others as steps."""
    found = [(loop.size, 0, i) for i, loop in enumerate(outer.loops) if loop.of in misfit]
    found += [(loop.size, 1, i) for i, loop in enumerate(inner.loops) if loop.to in misfit]
    _, side, number = min(found)
    if side == 0:
        for step in steps_of(outer, number):
            yield from _meeting(step, inner)
    else:
        for step in steps_of(inner, number):
            yield from _meeting(outer, step)


def without(copy: Copy, taken: Copy) -> list[Copy]:
    """Return what a copy brings of elements that another one does not.

    >>> [(left.start, left.end) for left in without(Copy.whole("w", (9,)), Copy.whole("v", (4,)))]
    [(4, 9)]
    """
    if taken.end <= copy.start or copy.end <= taken.start:
        return [copy]
    chain = chain_of([loop.to for loop in (*copy.loops, *taken.loops)])
    if isinstance(chain, Misfit):
        return _without_unrolled(copy, taken, chain)
    left = list(aligned(copy.start, copy.source_start, by_target(copy), chain))
    for part in aligned(taken.start, 0, by_target(taken), chain):
        left = [rest for one in left for rest in _cut_out(one, part, chain)]
    return [_copy_of(part, copy.source) for part in left]


def _without_unrolled(copy: Copy, taken: Copy, misfit: Misfit) -> list[Copy]:
    found = [(loop.size, 0, i) for i, loop in enumerate(copy.loops) if loop.to in misfit]
    found += [(loop.size, 1, i) for i, loop in enumerate(taken.loops) if loop.to in misfit]
    _, side, number = min(found)
    if side == 0:
        return [rest for step in steps_of(copy, number) for rest in without(step, taken)]
    left = [copy]
    for step in steps_of(taken, number):
        left = [rest for one in left for rest in without(one, step)]
    return left


def _cut_out(part: Aligned, taken: Aligned, chain: tuple[int, ...]) -> list[Aligned]:
    """Return the ranges of digits that are left of a part."""
    ranges: list[tuple[int, int, int]] = []
    for place, stride in enumerate(chain):
        radix = chain[place + 1] // stride if place + 1 < len(chain) else None
        first, other = part.start // stride, taken.start // stride
        if radix is not None:
            first, other = first % radix, other % radix
        size, of_other = part.ranges.get(stride, (1, 0))[0], taken.ranges.get(stride, (1, 0))[0]
        low, high = max(first, other) - first, min(first + size, other + of_other) - first
        if low >= high:
            return [part]
        ranges.append((stride, low, high))
    left: list[Aligned] = []
    for stride, low, high in ranges:
        size = part.ranges.get(stride, (1, 0))[0]
        if low > 0:
            left.append(part.cut(stride, 0, low))
        if high < size:
            left.append(part.cut(stride, high, size))
        part = part.cut(stride, low, high)
    return left


def _copy_of(part: Aligned, source: str | None) -> Copy:
    loops = tuple(Loop(size, stride, of) for stride, (size, of) in part.ranges.items())
    return simplified(Copy(source=source, start=part.start, source_start=part.other, loops=loops))
