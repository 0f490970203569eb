"""``Ragged``: a size of its own for every coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from dtckpt.errors import PlacementError

from ..integers import ints
from .base import SplitPlacement


@dataclass(frozen=True, slots=True)
class Ragged(SplitPlacement):
    """Splits tensor dim ``dim`` over the axis into pieces of the given sizes, one per coordinate.

    The sizes sum to the size of the dim; any of them may be 0. A ragged axis is the first to cut
    its dim, whatever its place in the mesh; other axes may shard its pieces further.

    Without sizes it is a question, which ``DTensor.from_local`` alone answers, by asking the ranks;
    a layout refuses it.

    >>> print(Ragged(0, (3, 0, 5)), Ragged(0))
    Ragged(0:3,0,5) Ragged(0)
    """

    form: ClassVar[str] = "Ragged(dim:size,size,...)"

    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        SplitPlacement.__post_init__(self)
        object.__setattr__(self, "sizes", ints(self.sizes, f"the sizes of Ragged(dim={self.dim})"))
        if min(self.sizes, default=0) < 0:
            raise PlacementError(
                f"Ragged(dim={self.dim}) needs one size of 0 or more per coordinate, "
                f"got {self.sizes}"
            )

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        """Return the sizes given, whether they fit or not."""
        del size, count
        return self.sizes

    def misfit(self, size: int, count: int) -> str:
        """Return why so many indices cannot be cut so over so many coordinates; else nothing."""
        if self.sizes:
            return SplitPlacement.misfit(self, size, count)
        return (
            "has no sizes, which only the placements of DTensor.from_local may leave out: the "
            f"ranks then tell theirs; give {count} sizes that sum to {size}, as in "
            f"Ragged({self.dim}, (...))"
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sizes."""
        return self.sizes

    @classmethod
    def of_numbers(cls, dim: int, numbers: tuple[int, ...]) -> Self:
        """Return the placement of these sizes."""
        return cls(dim, numbers)

    @property
    def label(self) -> str:
        """Its dim: drawings give the sizes, one for every rank, as far as there is room."""
        return f"Ragged({self.dim})"
