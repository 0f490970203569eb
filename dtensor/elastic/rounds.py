"""Which rank runs which group of a batch, and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..geometry.layout import Coordinate, Layout
from ..geometry.mesh import Mesh
from ..geometry.placement import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One group on each rank, one after the other over the ranks; the last round may have fewer."""

    first: int
    """The first group of the round."""
    count: int
    """How many groups it has."""
    own: int | None
    """That of this rank; None where the round has none for it."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The groups of a batch on the ranks of a mesh.

    Groups go round over the ranks, so that the gradients of each round continue the sum of those
    before it in the order of the groups, whatever the mesh.

    >>> rounds = Rounds(Mesh((2, 2)), 6)
    >>> [[one.own for one in rounds.at(here)] for here in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    [[0, 4], [1, None], [2, 5], [3, None]]
    """

    mesh: Mesh
    num_groups: int

    def __len__(self) -> int:
        return -(-self.num_groups // self.mesh.size)

    def at(self, coordinate: Coordinate) -> Iterator[Round]:
        """Yield the rounds as one rank takes part in them."""
        for first in range(0, self.num_groups, self.mesh.size):
            count = min(self.mesh.size, self.num_groups - first)
            rows = rows_of(self.mesh, (count,)).box(coordinate)
            own = None if rows.is_empty else first + rows.offsets[0]
            yield Round(first=first, count=count, own=own)

    def needed(self, coordinate: Coordinate) -> list[int]:
        """Return the group that a rank runs in each round.

        One without a group runs its last one again, or the first of all: it takes part in gathering
        parameters, and its gradients do not count.
        """
        found: list[int] = []
        last = 0
        for one in self.at(coordinate):
            last = last if one.own is None else one.own
            found.append(last)
        return found


def rows_of(mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """Return how values of the groups of one round lie, each in a row on the rank that ran it."""
    return Layout(mesh, (Shard(0),) * mesh.ndim, shape)
