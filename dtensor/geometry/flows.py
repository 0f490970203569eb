"""Flows: which boxes go from which rank to which, to turn one layout into another.

Every rank takes each part of what it is to hold from one holder of it: from itself where it has
it, else from a replica near it, so that the replicas of a part serve about as many ranks each.
All of it is arithmetic on the two layouts, whatever their meshes: of one shape or not, on the same
ranks, on some in common, or on none. Giver and taker derive the same answer alone.

Partial axes count as replicas: the values that move are terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .box import Box
from .layout import Cell, Coordinate, Layout
from .mesh import unravel

Flow = tuple[int, Box]
"""The rank at the other end, and what moves, in indices of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Flows:
    """The flows from one layout of a tensor to another.

    >>> from .mesh import Mesh
    >>> from .placement import Shard
    >>> rows = Layout(Mesh((2,)), (Shard(0),), (4, 4))
    >>> columns = Layout(Mesh((3,)), (Shard(1),), (4, 4))
    >>> for rank, box in Flows(rows, columns).into(1):
    ...     print(rank, box)
    0 [0:2,2:4]
    1 [2:4,2:4]
    """

    source: Layout
    target: Layout

    def into(self, rank: int) -> Iterator[Flow]:
        """Yield what a rank takes and from whom, itself included; disjoint boxes."""
        at = self.target.mesh.coordinate(rank)
        if at is None:
            return
        for cell, common in self.source.cells_meeting(self.target.box(at)):
            yield self._giver(cell, rank, at), common

    def out_of(self, rank: int) -> Iterator[Flow]:
        """Yield what a rank gives and to whom, itself included."""
        here = self.source.mesh.coordinate(rank)
        if here is None:
            return
        cell = self.source.cell(here)
        own = self.source.cell_box(cell)
        if self.source.mesh == self.target.mesh:
            yield from self._out_on_mesh(rank, here, own)
            return
        for wanted, common in self.target.cells_meeting(own):
            for taker, at in _coordinates(self.target, wanted):
                if self._giver(cell, taker, at) == rank:
                    yield taker, common

    def _out_on_mesh(self, rank: int, here: Coordinate, own: Box) -> Iterator[Flow]:
        fixed = [axis for axis in self.source.replica_axes if self.source.mesh.shape[axis] > 1]
        for wanted, common in self.target.cells_meeting(own):
            for taker, _ in _coordinates(self.target, wanted, fixed, here):
                yield taker, common

    def _giver(self, cell: Cell, rank: int, at: Coordinate) -> int:
        """Return the rank that gives (part of) a cell to the rank at ``at`` of the target."""
        source = self.source
        if source.mesh == self.target.mesh:
            # The one with its own index along all axes that replicate: those that moved nothing
            # along an axis then need no traffic along it.
            return source.mesh.rank(_replaced(source, cell, at))
        here = source.mesh.coordinate(rank)
        if here is not None and source.cell(here) == cell:
            return rank
        number, count = self._number(cell, at)
        replica = number * source.num_replicas // count
        return source.mesh.rank(source.coordinate(cell, replica))

    def _number(self, cell: Cell, at: Coordinate) -> tuple[int, int]:
        """Return which of the takers of a cell a coordinate of the target is, and how many are."""
        target = self.target
        ranges = target.grid_ranges(self.source.cell_box(cell))
        number, count = 0, 1
        for index, indices in zip(target.cell(at), ranges, strict=True):
            number = number * len(indices) + index - indices.start
            count *= len(indices)
        replicas = target.num_replicas
        return number * replicas + target.replica(at), count * replicas


def holders(layout: Layout, box: Box) -> Iterator[Flow]:
    """Yield (rank, common box) of every rank that holds elements of a box."""
    for cell, common in layout.cells_meeting(box):
        for rank, _ in _coordinates(layout, cell):
            yield rank, common


def _coordinates(
    layout: Layout, cell: Cell, fixed: list[int] | None = None, at: Coordinate = ()
) -> Iterator[tuple[int, Coordinate]]:
    """Yield rank and coordinate of the replicas of a cell that agree with ``at`` where fixed."""
    mesh = layout.mesh
    coordinate = list(_replaced(layout, cell, (0,) * mesh.ndim))
    free = layout.replica_axes
    if fixed:
        if any(coordinate[axis] != at[axis] for axis in fixed if axis not in free):
            return
        for axis in fixed:
            coordinate[axis] = at[axis]
        free = tuple(axis for axis in free if axis not in fixed)
    for indices in itertools.product(*(range(mesh.shape[axis]) for axis in free)):
        for axis, index in zip(free, indices, strict=True):
            coordinate[axis] = index
        found = tuple(coordinate)
        yield mesh.rank(found), found


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


def numel_lacking(layout: Layout, wanted: Layout, rank: int) -> int:
    """Return how many elements of its box of ``wanted`` a rank does not hold in ``layout``."""
    at, here = wanted.mesh.coordinate(rank), layout.mesh.coordinate(rank)
    if at is None:
        return 0
    box = wanted.box(at)
    common = None if here is None else layout.box(here).intersect(box)
    return math.prod(box.sizes) - (0 if common is None else common.numel)
