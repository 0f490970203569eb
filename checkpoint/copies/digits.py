"""The number system of two copies that meet: digits, and copies as ranges of each.

Where the strides of both divide one another they are its places. A loop then counts one digit up,
so what two copies have in common is what their ranges have, digit by digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .copies import Copy, Loop, simplified


class Side(NamedTuple):
    """A loop, seen from the side on which copies meet."""

    size: int
    stride: int
    other: int
    """Stride on the other side."""


def by_source(copy: Copy) -> list[Side]:
    return [Side(n, of, to) for n, to, of in copy.loops]


def by_target(copy: Copy) -> list[Side]:
    return [Side(n, to, of) for n, to, of in copy.loops]


class Misfit(NamedTuple):
    """Two strides of which the first does not divide the second."""

    small: int
    large: int


def chain_of(strides: Iterable[int]) -> tuple[int, ...] | Misfit:
    """Return 1 and all strides by size, if each divides the next.

    Then they are the places of a number system: every element has one digit for each, and a loop
    counts one digit up.
    """
    chain = [1]
    for stride in sorted({*strides} - {0, 1}):
        if stride % chain[-1]:
            return Misfit(chain[-1], stride)
        chain.append(stride)
    return tuple(chain)


class Aligned(NamedTuple):
    """Elements that are a range of every digit."""

    start: int
    other: int
    """The first element on the other side."""
    ranges: dict[int, tuple[int, int]]
    """By the stride of a digit: how many values it takes, and the stride on the other side."""
    repeats: tuple[tuple[int, int], ...]
    """Loops that read the same again: size, and stride on the other side."""

    def cut(self, stride: int, low: int, high: int) -> Aligned:
        """Return the part of which one digit takes values from ``low`` to ``high``."""
        _, other = self.ranges.get(stride, (1, 0))
        ranges = {place: taken for place, taken in self.ranges.items() if place != stride}
        if high - low > 1:
            ranges[stride] = high - low, other
        start, of = self.start + low * stride, self.other + low * other
        return Aligned(start, of, ranges, self.repeats)


def aligned(
    start: int, other: int, sides: Iterable[Side], chain: tuple[int, ...]
) -> Iterator[Aligned]:
    """Yield elements in parts of which no loop carries from a digit to the next."""
    sides = list(sides)
    repeats = tuple((side.size, side.other) for side in sides if side.stride == 0)
    todo = sorted((side for side in sides if side.stride), key=lambda side: side.stride)
    yield from _carried(Aligned(start, other, {}, repeats), todo, chain)


def _carried(done: Aligned, todo: list[Side], chain: tuple[int, ...]) -> Iterator[Aligned]:
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

    def taking(skipped: int, count: int, above: list[Side]) -> Iterator[Aligned]:
        ranges = done.ranges | ({stride: (count, other)} if count > 1 else {})
        moved = Aligned(
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
        carry = [Side(full, stride * radix, other * radix)] if full > 1 else []
        above = sorted([*carry, *rest], key=lambda side: side.stride)
        yield from taking(skipped, radix, above)
    if tail:
        yield from taking(skipped + full * radix, tail, rest)


def common(
    taken: Aligned, brought: Aligned, source: str | None, chain: tuple[int, ...]
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
