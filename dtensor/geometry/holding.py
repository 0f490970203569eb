"""Who holds what: the one question that is asked of layouts of every kind.

A ``Layout`` answers by arithmetic, an ``IrregularLayout`` looks it up. Who moves, reads or writes
boxes needs no more than this, and so never asks which of them it has.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Protocol

from .box import Box


class Holding(Protocol):
    """What every rank holds of one tensor: boxes that are equal or disjoint, and cover it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...

    def all_ranks(self) -> Sequence[int]:
        """Return every rank that may hold something."""
        ...

    def held_by(self, rank: int, replicas: Container[int] | None = None) -> tuple[Box, ...]:
        """Return the boxes that a rank holds, one for each of its local tensors.

        Only those of which it has one of some ``replicas``, where they are given. The only box of a
        rank in a mesh may be empty; none on ranks that are not in it.
        """
        ...

    def pieces_meeting(self, box: Box) -> Iterator[tuple[Sequence[int], Box, Box]]:
        """Yield (its ranks, held box, common box) of every different box that shares elements.

        The ranks are all that hold it, by number of replica.
        """
        ...

    def replica_ranks(self, held: Box) -> Sequence[int]:
        """Return the ranks that hold a box which is held, by number of replica."""
        ...

    def replica_of(self, rank: int, held: Box) -> int:
        """Return which replica of a box a rank has that holds it."""
        ...

    def giver_number(self, box: Box, taker: int, wanted: Box, num_givers: int) -> int:
        """Return which of so many holders of a box gives of it to a rank for what that wants.

        ``wanted`` is a box that the taker holds here. All holders give to about as many.
        """
        ...
