"""``Packed``: several parts of a dim, each of which is sharded by itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Self

from dtckpt.errors import PlacementError

from ..integers import ints
from ..order import Span
from .base import SplitPlacement
from .shard import Shard


@dataclass(frozen=True, slots=True)
class Packed(SplitPlacement):
    """Splits every part of tensor dim ``dim`` over the axis as ``Shard`` would split it alone.

    For weights that hold several in one: of the fused projection to queries, keys and values
    ``Packed(0, (q, k, v))`` gives every coordinate a share of each. ``sizes`` are those of the
    parts and sum to the size of the dim. A local tensor has its pieces of all parts, one after the
    other.

    >>> print(Packed(0, (4, 2, 2)))
    Packed(0:4,2,2)
    >>> Packed(0, (4, 2, 2)).ranges_over(8, 2)
    (((0, 2), (4, 1), (6, 1)), ((2, 2), (5, 1), (7, 1)))
    """

    form: ClassVar[str] = "Packed(dim:size,size,...)"

    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        SplitPlacement.__post_init__(self)
        object.__setattr__(self, "sizes", ints(self.sizes, f"the sizes of Packed(dim={self.dim})"))
        if not self.sizes or min(self.sizes) < 0:
            raise PlacementError(
                f"Packed(dim={self.dim}) needs a size of 0 or more for each part, got {self.sizes}"
            )

    def pieces_over(self, count: int) -> list[tuple[int, ...]]:
        """Return, for every part, the sizes of the pieces that ``count`` coordinates hold of it."""
        return [Shard(self.dim).sizes_over(size, count) for size in self.sizes]

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        """Return how much each coordinate holds of all parts together."""
        del size
        return tuple(map(sum, zip(*self.pieces_over(count), strict=True)))

    def ranges_over(self, size: int, count: int) -> tuple[tuple[Span, ...], ...]:
        """Return the pieces that each coordinate holds, one of every part."""
        del size
        firsts = itertools.accumulate(self.sizes[:-1], initial=0)
        parts = [
            zip(itertools.accumulate(row[:-1], initial=first), row, strict=True)
            for first, row in zip(firsts, self.pieces_over(count), strict=True)
        ]
        return tuple(zip(*parts, strict=True))

    def misfit(self, size: int, count: int) -> str:
        """Return why so many indices cannot be cut so over so many coordinates; else nothing."""
        if sum(self.sizes) != size:
            return f"has parts that sum to {sum(self.sizes)}, expected {size}, the size of the dim"
        return SplitPlacement.misfit(self, size, count)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sizes of the parts."""
        return self.sizes

    @classmethod
    def of_numbers(cls, dim: int, numbers: tuple[int, ...]) -> Self:
        """Return the placement of parts of these sizes."""
        return cls(dim, numbers)
