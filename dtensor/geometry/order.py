"""Orders: how the ranks hold the indices of a dim one after the other, where they do not ascend.

A placement may give a coordinate several ranges of a dim, which lie one after the other in its
local tensor. The dim is then counted twice: an *index* is where an element is in the tensor, a
*place* where it is if the parts of all coordinates are laid side by side. Places are cut as indices
are: into one range a coordinate, which other axes may cut further.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .box import Box

Span = tuple[int, int]
"""Start and size of a range."""


@dataclass(frozen=True, slots=True)
class Order:
    """The ranges of indices of a dim, by place.

    >>> order = Order(((0, 2), (4, 2), (2, 2), (6, 2)))
    >>> list(order.indices(1, 4))  # of the places 1 to 4
    [(1, 1), (4, 2), (2, 1)]
    >>> list(order.places(3, 3))  # of the indices 3 to 5
    [(5, 1), (2, 2)]
    """

    runs: tuple[Span, ...]
    """Start and size of each, none of them empty, no two of which are one."""
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Places at which runs end."""
    _ascending: tuple[tuple[int, int, int], ...] = field(init=False, repr=False, compare=False)
    """Index, place and size of each run, by index."""

    def __post_init__(self) -> None:
        ends = tuple(itertools.accumulate(size for _, size in self.runs))
        runs = zip(self.runs, ends, strict=True)
        ascending = sorted((start, end - size, size) for (start, size), end in runs)
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "_ascending", tuple(ascending))

    def indices(self, place: int, size: int) -> Iterator[Span]:
        """Yield the ranges of indices that some places hold, in the order of these."""
        for number in range(bisect_right(self._ends, place), len(self.runs)):
            start, length = self.runs[number]
            first = self._ends[number] - length
            low, high = max(place, first), min(place + size, first + length)
            if low >= high:
                return
            yield start + low - first, high - low

    def part_with(self, index: int, place: int, size: int) -> Span:
        """Return the range of indices around one of them that some places hold.

        >>> Order(((0, 2), (4, 2), (2, 2), (6, 2))).part_with(5, 3, 3)  # of the places 3 to 5
        (5, 1)
        """
        number = bisect_right(self._ascending, index, key=lambda run: run[0]) - 1
        start, first, length = self._ascending[number]
        low, high = max(place, first), min(place + size, first + length)
        return start + low - first, high - low

    def places(self, index: int, size: int) -> Iterator[Span]:
        """Yield the ranges of places that hold some indices, in the order of these."""
        number = bisect_right(self._ascending, index, key=lambda run: run[0]) - 1
        for start, place, length in self._ascending[max(number, 0) :]:
            low, high = max(index, start), min(index + size, start + length)
            if low >= high:
                return
            yield place + low - start, high - low


def order_of(runs: Iterable[Span]) -> Order | None:
    """Return the order of runs, which may be empty or follow each other; None if they ascend.

    >>> order_of(((0, 2), (2, 0), (2, 3))) is None
    True
    """
    joined: list[Span] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        elif size:
            joined.append((start, size))
    return Order(tuple(joined)) if len(joined) > 1 else None


def covers(runs: Iterable[Span], size: int) -> bool:
    """Whether runs have every index of a dim once."""
    at = 0
    for start, length in sorted(run for run in runs if run[1]):
        if start != at or length < 0:
            return False
        at += length
    return at == size


def indexed(orders: Sequence[Order | None], box: Box) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of a tensor that a box of places holds, and where in it.

    There is an order for each dim, or None where places are indices.
    """
    dims: list[list[tuple[int, int, int]]] = []
    for order, start, size in zip(orders, box.offsets, box.sizes, strict=True):
        spans, at = [(start, size)] if order is None else order.indices(start, size), 0
        found: list[tuple[int, int, int]] = []
        for index, length in spans:
            found.append((index, at, length))
            at += length
        dims.append(found)
    for chosen in itertools.product(*dims):
        indices, within, sizes = zip(*chosen, strict=True)
        yield Box(indices, sizes), Box(within, sizes)


def placed(orders: Sequence[Order | None], box: Box) -> Iterator[Box]:
    """Yield the boxes of places that hold a box of a tensor, which is not empty."""
    spans = (
        [(start, size)] if order is None else order.places(start, size)
        for order, start, size in zip(orders, box.offsets, box.sizes, strict=True)
    )
    for chosen in itertools.product(*spans):
        places, sizes = zip(*chosen, strict=True)
        yield Box(places, sizes)
