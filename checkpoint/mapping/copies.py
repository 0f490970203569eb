"""Copies: which elements of one tensor are which of another, as one nest of loops.

A copy is the ground form of every mapping. Both sides count elements in row-major order, so that a
change of shape changes nothing, and the inverse is the same copy with its sides exchanged. Splits,
merges, permutations, stacks, regrouped heads and padding are a few copies each, and copies through
a tensor in between are copies again (``through``). Pure integers: no element is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box, row_major_strides

MOST_COPIES = 1 << 16
"""Of one tensor: a table that takes more is refused before it takes all memory."""


class Loop(NamedTuple):
    """Steps of a copy along one direction; strides are in elements, in row-major order."""

    size: int
    to: int
    """Elements of the target from one step to the next."""
    of: int
    """Elements of the source from one step to the next; 0 where one is read again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Elements of a source and where in the target they belong.

    >>> [tuple(loop) for loop in permutation((2, 3), (1, 0)).loops]
    [(3, 2, 1), (2, 1, 3)]
    """

    source: str | None
    """Name of the tensor; None for elements that are all zero bits, and come from nowhere."""
    start: int = 0
    """First element in the target."""
    source_start: int = 0
    loops: tuple[Loop, ...] = ()
    """None of size 1, by falling strides in the target; none at all for one element."""

    @classmethod
    def whole(cls, source: str | None, shape: Sequence[int]) -> Copy:
        """Return the copy of all elements of a tensor that has some, in the same order."""
        return cls(source=source, loops=_run(math.prod(shape), 0 if source is None else 1))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(loop.size for loop in self.loops)

    @property
    def end(self) -> int:
        """One past the last element in the target."""
        return self.start + sum((n - 1) * to for n, to, _ in self.loops) + 1

    @property
    def source_end(self) -> int:
        """One past the last element in the source."""
        return self.source_start + sum((n - 1) * of for n, _, of in self.loops) + 1

    @property
    def is_run(self) -> bool:
        """Whether the elements are contiguous, and in the same order, on both sides."""
        return not self.loops or (len(self.loops) == 1 and self.loops[0][1:] == (1, 1))

    def inverse(self, target: str | None = None) -> Copy:
        """Return the copy from the target, of some name, back to the source."""
        loops = (Loop(n, of, to) for n, to, of in self.loops)
        return simplified(
            replace(
                self,
                source=self.source if target is None else target,
                start=self.source_start,
                source_start=self.start,
                loops=tuple(loops),
            )
        )


def _run(count: int, of: int) -> tuple[Loop, ...]:
    return (Loop(count, 1, of),) if count > 1 else ()


def simplified(copy: Copy) -> Copy:
    """Return a copy with as few loops as it needs."""
    loops = [loop for loop in copy.loops if loop.size != 1]
    loops.sort(key=lambda loop: -loop.to)
    joined: list[Loop] = []
    for loop in loops:
        last = joined[-1] if joined else None
        if last and (last.to, last.of) == (loop.to * loop.size, loop.of * loop.size):
            joined[-1] = Loop(last.size * loop.size, loop.to, loop.of)
        else:
            joined.append(loop)
    return replace(copy, loops=tuple(joined))


def box_copy(source: str | None, box: Box, shape: tuple[int, ...]) -> Copy:
    """Return the copy of a box of a source of ``shape`` into a target of the sizes of the box."""
    strides = row_major_strides(shape)
    steps = zip(box.sizes, row_major_strides(box.sizes), strides, strict=True)
    start = sum(a * s for a, s in zip(box.offsets, strides, strict=True))
    loops = tuple(Loop(*step) for step in steps)
    return simplified(Copy(source=source, source_start=start, loops=loops))


def permutation(shape: Sequence[int], dims: Sequence[int]) -> Copy:
    """Return the copy of a tensor of ``shape`` to one whose dim i is dim ``dims[i]`` of it."""
    strides = row_major_strides(tuple(shape))
    sizes = tuple(shape[dim] for dim in dims)
    steps = zip(sizes, row_major_strides(sizes), (strides[dim] for dim in dims), strict=True)
    return simplified(Copy(source="", loops=tuple(Loop(*step) for step in steps)))


def through(outer: Copy, inner: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the copies that bring elements by way of the tensor that ``outer`` copies from.

    ``inner`` are those that make up that tensor. LayoutMismatch where the two fit together so
    badly that it would take more than MOST_COPIES.

    >>> rows = box_copy("", Box((1, 0), (2, 3)), (4, 3))
    >>> [copy.source_start for copy in through(rows, [Copy.whole("w", (4, 3))])]
    [3]
    """
    count = 0
    for copy in inner:
        for found in _meeting(outer, copy):
            count += 1
            if count > MOST_COPIES:
                raise LayoutMismatch(_too_irregular(copy.source))
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
    chain = _chain([*(loop.of for loop in outer.loops), *(loop.to for loop in inner.loops)])
    if isinstance(chain, _Misfit):
        yield from _unrolled(outer, inner, chain)
        return
    taken = list(_aligned(outer.source_start, outer.start, _by_source(outer), chain))
    brought = list(_aligned(inner.start, inner.source_start, _by_target(inner), chain))
    for one in taken:
        for other in brought:
            found = _common(one, other, inner.source, chain)
            if found is not None:
                yield found


def _by_source(copy: Copy) -> list[_Side]:
    return [_Side(n, of, to) for n, to, of in copy.loops]


def _by_target(copy: Copy) -> list[_Side]:
    return [_Side(n, to, of) for n, to, of in copy.loops]


def _unrolled(outer: Copy, inner: Copy, misfit: _Misfit) -> Iterator[Copy]:
    """Yield what the two have in common, with a loop that does not fit the others as steps."""
    found = [(loop.size, 0, i) for i, loop in enumerate(outer.loops) if loop.of in misfit]
    found += [(loop.size, 1, i) for i, loop in enumerate(inner.loops) if loop.to in misfit]
    _, side, number = min(found)
    if side == 0:
        for step in _steps(outer, number):
            yield from _meeting(step, inner)
    else:
        for step in _steps(inner, number):
            yield from _meeting(outer, step)


def _steps(copy: Copy, number: int) -> Iterator[Copy]:
    """Yield a copy for each step of one of its loops."""
    size, to, of = copy.loops[number]
    if size > MOST_COPIES:
        raise LayoutMismatch(_too_irregular(copy.source))
    rest = simplified(replace(copy, loops=copy.loops[:number] + copy.loops[number + 1 :]))
    for i in range(size):
        yield replace(rest, start=copy.start + i * to, source_start=copy.source_start + i * of)


def _too_irregular(source: str | None) -> str:
    return (
        f"the elements of tensor {source!r} would be copied in more than {MOST_COPIES} pieces; "
        "the sizes of a mapping have to divide the dims that they cut"
    )


class _Side(NamedTuple):
    """A loop, seen from the side on which copies meet."""

    size: int
    stride: int
    other: int
    """Stride on the other side."""


class _Misfit(NamedTuple):
    """Two strides of which the first does not divide the second."""

    small: int
    large: int


def _chain(strides: Iterable[int]) -> tuple[int, ...] | _Misfit:
    """Return 1 and all strides by size, if each divides the next.

    Then they are the places of a number system: every element has one digit for each, and a loop
    counts one digit up.
    """
    chain = [1]
    for stride in sorted({*strides} - {0, 1}):
        if stride % chain[-1]:
            return _Misfit(chain[-1], stride)
        chain.append(stride)
    return tuple(chain)


class _Aligned(NamedTuple):
    """Elements that are a range of every digit."""

    start: int
    other: int
    """The first element on the other side."""
    ranges: dict[int, tuple[int, int]]
    """By the stride of a digit: how many values it takes, and the stride on the other side."""
    repeats: tuple[tuple[int, int], ...]
    """Loops that read the same again: size, and stride on the other side."""


def _aligned(
    start: int, other: int, sides: Iterable[_Side], chain: tuple[int, ...]
) -> Iterator[_Aligned]:
    """Yield elements in parts of which no loop carries from a digit to the next."""
    sides = list(sides)
    repeats = tuple((side.size, side.other) for side in sides if side.stride == 0)
    todo = sorted((side for side in sides if side.stride), key=lambda side: side.stride)
    yield from _carried(_Aligned(start, other, {}, repeats), todo, chain)


def _carried(done: _Aligned, todo: list[_Side], chain: tuple[int, ...]) -> Iterator[_Aligned]:
    if not todo:
        yield done
        return
    (size, stride, other), rest = todo[0], todo[1:]
    place = chain.index(stride)
    radix = chain[place + 1] // stride if place + 1 < len(chain) else None
    if rest and rest[0].stride == stride:  # two loops of one digit: the elements overlap
        for i in range(size):
            moved = done._replace(start=done.start + i * stride, other=done.other + i * other)
            yield from _carried(moved, rest, chain)
        return

    def taking(skipped: int, count: int, above: list[_Side]) -> Iterator[_Aligned]:
        ranges = done.ranges | ({stride: (count, other)} if count > 1 else {})
        moved = _Aligned(
            done.start + skipped * stride, done.other + skipped * other, ranges, done.repeats
        )
        yield from _carried(moved, above, chain)

    if radix is None:
        yield from taking(0, size, rest)
        return
    first = done.start // stride % radix
    skipped = 0
    if first and first + size > radix:
        skipped = radix - first
        yield from taking(0, skipped, rest)
    elif first:
        yield from taking(0, size, rest)
        return
    full, tail = divmod(size - skipped, radix)
    if full:
        carry = [_Side(full, stride * radix, other * radix)] if full > 1 else []
        above = sorted([*carry, *rest], key=lambda side: side.stride)
        yield from taking(skipped, radix, above)
    if tail:
        yield from taking(skipped + full * radix, tail, rest)


def _common(
    taken: _Aligned, brought: _Aligned, source: str | None, chain: tuple[int, ...]
) -> Copy | None:
    """Return the elements that both have, or None where there are none."""
    to, of = taken.other, brought.other
    loops = [Loop(size, stride, 0) for size, stride in taken.repeats]
    loops += [Loop(size, 0, stride) for size, stride in brought.repeats]
    for place, stride in enumerate(chain):
        a, b = taken.start // stride, brought.start // stride
        if place + 1 < len(chain):
            radix = chain[place + 1] // stride
            a, b = a % radix, b % radix
        n, to_stride = taken.ranges.get(stride, (1, 0))
        m, of_stride = brought.ranges.get(stride, (1, 0))
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        to += (low - a) * to_stride
        of += (low - b) * of_stride
        loops.append(Loop(high - low, to_stride, of_stride))
    return simplified(Copy(source=source, start=to, source_start=of, loops=tuple(loops)))


def joined(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """Return copies by their place in the target, those in one that are steps of a loop."""
    ordered = sorted(copies, key=lambda copy: copy.start)
    found: list[Copy] = []
    at = 0
    while at < len(ordered):
        first, count = ordered[at], 1
        by = (0, 0)
        while at + count < len(ordered):
            last, copy = ordered[at + count - 1], ordered[at + count]
            if (copy.source, copy.loops) != (first.source, first.loops):
                break
            step = copy.start - last.start, copy.source_start - last.source_start
            if step[0] <= 0 or step[1] < 0 or (count > 1 and step != by):
                break
            by, count = step, count + 1
        made = simplified(replace(first, loops=(Loop(count, *by), *first.loops)))
        if count > 2 or len(made.loops) <= len(first.loops):
            found.append(made)
        else:  # two that only happen to have the same sizes
            found += ordered[at : at + count]
        at += count
    return tuple(found) if len(found) == len(ordered) else joined(found)


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
    chain = _chain([*cut, *(loop.of for loop in copy.loops)])
    if isinstance(chain, _Misfit):
        fitting = [(loop.size, i) for i, loop in enumerate(copy.loops) if loop.of in chain]
        for step in _steps(copy, min(fitting)[1]):
            yield from source_boxes(step, shape, most_skipped)
        return
    for part in _aligned(copy.source_start, copy.start, _by_source(copy), chain):
        yield from _boxes(part, copy.source, shape, strides, most_skipped)


def _boxes(
    part: _Aligned,
    source: str | None,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    most_skipped: int,
) -> Iterator[tuple[Box, Copy]]:
    offsets, sizes = list[int](), list[int]()
    found: list[list[_Side]] = []
    for size, stride in zip(shape, strides, strict=True):
        offsets.append(part.start // stride % size)
        inside = sorted(s for s in part.ranges if stride <= s < stride * size)
        loops = [_Side(part.ranges[s][0], s // stride, part.ranges[s][1]) for s in inside]
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
    part: _Aligned,
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
