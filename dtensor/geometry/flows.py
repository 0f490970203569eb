"""Flows: which boxes go from which rank to which, to turn one layout into another.

Every rank takes each part of what it is to hold from one holder of it: from itself where it has
it, else from a replica near it, so that the replicas of a part serve about as many ranks each.
All of it follows from the two layouts, whatever these are: on meshes of one shape or not, lists of
boxes, of the same ranks, some in common, or none. Giver and taker derive the same answer alone.

Partial axes count as replicas: the values that move are terms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .box import Box
from .holding import Holding
from .layout import Cell, Coordinate, Layout
from .mesh import unravel

Flow = tuple[int, Box]
"""The rank at the other end, and what moves, in indices of the whole tensor."""
PartFlow = tuple[int, Box, Box]
"""The rank at the other end, the box at this end that has it, and what moves."""


@dataclass(frozen=True, slots=True)
class Flows:
    """The flows from one layout of a tensor to another, be they regular or not.

    >>> from .mesh import Mesh
    >>> from .placement import Shard
    >>> rows = Layout(Mesh((2,)), (Shard(0),), (4, 4))
    >>> columns = Layout(Mesh((3,)), (Shard(1),), (4, 4))
    >>> for rank, box in Flows(rows, columns).into(1):
    ...     print(rank, box)
    0 [0:2,2:4]
    1 [2:4,2:4]
    """

    source: Holding
    target: Holding

    def into(self, rank: int) -> Iterator[Flow]:
        """Yield what a rank takes and from whom, itself included; disjoint boxes."""
        return ((giver, common) for giver, _, common in self.parts_into(rank))

    def out_of(self, rank: int) -> Iterator[Flow]:
        """Yield what a rank gives and to whom, itself included."""
        return ((taker, common) for taker, _, common in self.parts_out_of(rank))

    def parts_into(self, rank: int) -> Iterator[PartFlow]:
        """Yield the same as ``into``, with the boxes that the rank is to hold."""
        on_mesh = self._on_mesh()
        for wanted in self.target.held_by(rank):
            if on_mesh is not None:
                yield from _into_on_mesh(on_mesh[0], rank, wanted)
                continue
            for givers, held, common in self.source.pieces_meeting(wanted):
                yield self._giver(givers, held, rank, wanted), wanted, common

    def parts_out_of(self, rank: int) -> Iterator[PartFlow]:
        """Yield the same as ``out_of``, with the boxes that the rank holds."""
        on_mesh = self._on_mesh()
        for held in self.source.held_by(rank):
            if on_mesh is not None:
                yield from _out_on_mesh(*on_mesh, rank, held)
                continue
            givers = self.source.replica_ranks(held)
            for takers, wanted, common in self.target.pieces_meeting(held):
                for taker in takers:
                    if self._giver(givers, held, taker, wanted) == rank:
                        yield taker, held, common

    def sent_by(self, rank: int) -> list[PartFlow]:
        """Return what ``parts_out_of`` yields, for every taker in the order that it expects."""
        return sorted(self.parts_out_of(rank), key=_place)

    def received_by(self, rank: int) -> list[PartFlow]:
        """Return what ``parts_into`` yields, from every giver in the order in which that sends."""
        return sorted(self.parts_into(rank), key=_place)

    def _on_mesh(self) -> tuple[Layout, Layout] | None:
        """Return both layouts if they are on one mesh."""
        source, target = self.source, self.target
        if isinstance(source, Layout) and isinstance(target, Layout):
            return (source, target) if source.mesh == target.mesh else None
        return None

    def _giver(self, givers: Sequence[int], held: Box, taker: int, wanted: Box) -> int:
        """Return which of the holders of a box gives of it to a rank for a box that this wants."""
        if taker in givers:
            return taker
        count = len(givers)
        number = self.target.giver_number(held, taker, wanted, count) if count > 1 else 0
        return givers[number]


def _place(part: PartFlow) -> tuple[tuple[int, ...], int]:
    return part[2].offsets, part[0]


# Between layouts of one mesh everybody takes from the rank with its own index along all axes that
# replicate in the source: those that moved nothing along an axis then need no traffic along it.


def _into_on_mesh(source: Layout, rank: int, wanted: Box) -> Iterator[PartFlow]:
    at = source.mesh.coordinate(rank) or ()
    for cell, common in source.cells_meeting(wanted):
        yield source.mesh.rank(_replaced(source, cell, at)), wanted, common


def _out_on_mesh(source: Layout, target: Layout, rank: int, held: Box) -> Iterator[PartFlow]:
    mesh = source.mesh
    here = mesh.coordinate(rank) or ()
    free = [axis for axis in target.replica_axes if axis not in source.replica_axes]
    fixed = [axis for axis in source.replica_axes if mesh.shape[axis] > 1]
    for wanted, common in target.cells_meeting(held):
        at = list(_replaced(target, wanted, here))
        if any(at[axis] != here[axis] for axis in fixed):
            continue
        for indices in itertools.product(*(range(mesh.shape[axis]) for axis in free)):
            for axis, index in zip(free, indices, strict=True):
                at[axis] = index
            yield mesh.rank(tuple(at)), held, common


def _replaced(layout: Layout, cell: Cell, at: Coordinate) -> Coordinate:
    """Return the coordinate that holds a cell and agrees with ``at`` along axes that replicate."""
    coordinate = list(at)
    for cuts, index in zip(layout.splits, cell, strict=True):
        if len(cuts) == 1:
            coordinate[cuts[0].axis] = index
        elif cuts:
            digits = unravel(index, tuple(split.num_pieces for split in cuts))
            for split, digit in zip(cuts, digits, strict=True):
                coordinate[split.axis] = digit
    return tuple(coordinate)


def numel_lacking(layout: Holding, wanted: Holding, rank: int) -> int:
    """Return how many elements of its boxes of ``wanted`` a rank does not hold in ``layout``."""
    lacking = 0
    for box in wanted.held_by(rank):
        common = (held.intersect(box) for held in layout.held_by(rank))
        lacking += box.numel - sum(part.numel for part in common if part is not None)
    return lacking
