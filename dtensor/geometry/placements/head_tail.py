"""``HeadTail``: a piece from either end of a dim, so that causal attention is the same work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from ..order import Span
from .base import SplitPlacement


@dataclass(frozen=True, slots=True)
class HeadTail(SplitPlacement):
    """Splits tensor dim ``dim`` over the axis so that each coordinate has a part of either end.

    Of 2 k chunks of the dim, coordinate r of k holds the chunks r and 2 k - 1 - r, one after the
    other. Chunks are as even as they can be: the first ones have one index more where 2 k does not
    divide the size. It is how context parallelism lays out a sequence: under a causal mask late
    positions are more work than early ones, and so every rank has as much.

    >>> HeadTail(0).ranges_over(9, 2)
    (((0, 3), (7, 2)), ((3, 2), (5, 2)))
    >>> print(HeadTail(2))
    HeadTail(2)
    """

    form: ClassVar[str] = "HeadTail(dim)"

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        """Return how many indices each of ``count`` coordinates holds, in both of its chunks."""
        return tuple(head + tail for (_, head), (_, tail) in self.ranges_over(size, count))

    def ranges_over(self, size: int, count: int) -> tuple[tuple[Span, ...], ...]:
        """Return the chunks of each coordinate."""
        short, longer = divmod(size, 2 * count)
        sizes = [short + (chunk < longer) for chunk in range(2 * count)]
        starts = list(itertools.accumulate(sizes, initial=0))
        found: list[tuple[Span, ...]] = []
        for head in range(count):
            tail = 2 * count - 1 - head
            found.append(((starts[head], sizes[head]), (starts[tail], sizes[tail])))
        return tuple(found)
