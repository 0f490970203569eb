"""Copies: which elements of one tensor are which of another, as one nest of loops.

A copy is the ground form of every mapping. Both sides count elements in row-major order, so that a
change of shape changes nothing, and the inverse is the same copy with its sides exchanged. Splits,
merges, permutations, stacks, regrouped heads and padding are a few copies each, and copies through
a tensor in between are copies again (``meeting``). Pure integers: no element is looked at.
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


def steps_of(copy: Copy, number: int) -> Iterator[Copy]:
    """Yield a copy for each step of one of its loops."""
    size, to, of = copy.loops[number]
    if size > MOST_COPIES:
        raise LayoutMismatch(too_irregular(copy.source))
    rest = simplified(replace(copy, loops=copy.loops[:number] + copy.loops[number + 1 :]))
    for i in range(size):
        yield replace(rest, start=copy.start + i * to, source_start=copy.source_start + i * of)


def too_irregular(source: str | None) -> str:
    return (
        f"the elements of tensor {source!r} would be copied in more than {MOST_COPIES} pieces; "
        "the sizes of a mapping have to divide the dims that they cut"
    )
