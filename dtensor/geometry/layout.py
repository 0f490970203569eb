"""Layouts: which elements of a tensor every coordinate of a mesh holds.

From a layout alone any rank computes what any other rank holds, by arithmetic. The axes that split
a dim cut it one after the other, each cutting the pieces of the one before, so a dim falls into a
row of intervals and the tensor into a grid of *cells*. A cell is held by as many coordinates as
the remaining axes have: its *replicas*.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, overload

from dtckpt.errors import PlacementError

from .box import Box
from .integers import ints
from .mesh import Mesh, unravel
from .order import Order, indexed, placed
from .placement import Placement, Ragged, Replicate, Shard, format_placements, parse_placement
from .splits import Split, cut_by

Coordinate = tuple[int, ...]
Cell = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor of ``shape`` laid out on ``mesh`` by one placement per axis.

    Immutable and hashable. Negative dims are normalised, and an explicit shard order that equals
    the default one is dropped, so equal layouts compare equal.

    >>> layout = Layout(Mesh((2, 2), ("dp", "tp")), (Shard(0), Shard(1)), (5, 4))
    >>> [str(layout.box(c)) for c in layout.mesh.coordinates()]
    ['[0:3,0:2]', '[0:3,2:4]', '[3:5,0:2]', '[3:5,2:4]']
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    splits: tuple[tuple[Split, ...], ...] = field(init=False, repr=False, compare=False)
    """For every tensor dim the axes that cut it, in cutting order."""
    replica_axes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Axes that cut nothing."""
    orders: tuple[Order | None, ...] = field(init=False, repr=False, compare=False)
    """For every tensor dim the order in which ranks hold its indices; None where they ascend."""
    is_dealt: bool = field(init=False, repr=False, compare=False)
    """Whether there is such a dim, so that a rank may hold several boxes. What is said of cells is
    then said of places (``order.py``); ``held_by``, ``parts`` and ``cells_meeting`` tell boxes of
    the tensor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", ints(self.shape, "the shape of a tensor"))
        if self.shape and min(self.shape) < 0:
            raise PlacementError(f"a tensor cannot have the shape {self.shape}")
        placements, splits = cut_by(self.placements, self.mesh, self.shape)
        replica_axes = tuple(i for i, p in enumerate(placements) if not p.is_shard())
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "splits", splits)
        object.__setattr__(self, "replica_axes", replica_axes)
        orders = tuple(cuts[0].order if cuts else None for cuts in splits)
        object.__setattr__(self, "orders", orders)
        object.__setattr__(self, "is_dealt", any(orders))

    @classmethod
    def replicated(cls, mesh: Mesh, shape: Sequence[int]) -> Layout:
        """Return the layout in which every rank of the mesh holds the whole tensor."""
        return cls(mesh, (Replicate(),) * mesh.ndim, ints(shape, "the shape of a tensor"))

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def is_partial(self) -> bool:
        """Whether some axis still waits for a reduction."""
        return any(p.is_partial() for p in self.placements)

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of cells along every dim, empty ones included."""
        return tuple(math.prod(split.num_pieces for split in cuts) for cuts in self.splits)

    @property
    def num_replicas(self) -> int:
        """How many coordinates hold each cell."""
        return math.prod(self.mesh.shape[axis] for axis in self.replica_axes)

    def lies_as(self, other: Layout) -> bool:
        """Whether every coordinate holds the same values in both layouts.

        >>> one, whole = Layout(Mesh((1,)), (Shard(0),), (4,)), Layout.replicated(Mesh((1,)), (4,))
        >>> one == whole, one.lies_as(whole)
        (False, True)
        """
        if self == other:
            return True
        if self.mesh != other.mesh or self.shape != other.shape or 1 not in self.mesh.shape:
            return False
        return self.without_single_axes() == other.without_single_axes()

    def without_single_axes(self) -> Layout:
        """Return the layout with Replicate along axes of one coordinate.

        These cut nothing, and their only term is the value.
        """
        counts = self.mesh.shape
        if 1 not in counts:
            return self
        placements = [Replicate() if counts[a] == 1 else p for a, p in enumerate(self.placements)]
        for dim, cuts in enumerate(self.splits):
            even = [s.axis for s in cuts if s.starts is None and counts[s.axis] > 1]
            for order, axis in enumerate(even):
                placements[axis] = Shard(dim, order)
        return Layout(self.mesh, tuple(placements), self.shape)

    def in_places(self) -> Layout:
        """Return the layout of the places: the same local tensors, each a single box.

        >>> from .placement import Packed
        >>> print(Layout(Mesh((2,)), (Packed(0, (4, 2)),), (6,)).in_places())
        [6] (Ragged(0:3,3)) on axis0=2
        """
        if not self.is_dealt:
            return self
        placements = list(self.placements)
        for dim, order in enumerate(self.orders):
            if order is not None:
                first = self.splits[dim][0]
                sizes = [first.piece(i, self.shape[dim])[1] for i in range(first.num_pieces)]
                placements[first.axis] = Ragged(dim, tuple(sizes))
        return Layout(self.mesh, tuple(placements), self.shape)

    def box(self, coordinate: Coordinate) -> Box:
        """Return what a coordinate holds; its sizes are the shape of the local tensor.

        Of a dealt layout in places, of which ``parts`` are the indices.
        """
        return self.cell_box(self.cell(coordinate))

    def parts(self, coordinate: Coordinate) -> tuple[tuple[Box, Box], ...]:
        """Return the boxes that a coordinate holds, each with where its local tensor has it.

        >>> from .placement import Packed
        >>> for held, local in Layout(Mesh((2,)), (Packed(0, (4, 2)),), (6,)).parts((1,)):
        ...     print(held, local)
        [2:4] [0:2]
        [5:6] [2:3]
        """
        return self._parts_of(self.cell(coordinate))

    def _parts_of(self, cell: Cell) -> tuple[tuple[Box, Box], ...]:
        box = self.cell_box(cell)
        if not self.is_dealt or box.is_empty:
            return ((box, Box.whole(box.sizes)),)
        return tuple(indexed(self.orders, box))

    def placed(self, box: Box) -> Iterator[Box]:
        """Yield the boxes of places that hold a box of the tensor, which is not empty."""
        return placed(self.orders, box) if self.is_dealt else iter((box,))

    def cell(self, coordinate: Coordinate) -> Cell:
        """Return the grid index of the cell that a coordinate holds."""
        self.mesh.check(coordinate)
        index: list[int] = []
        for cuts in self.splits:
            position = 0
            for split in cuts:
                position = position * split.num_pieces + coordinate[split.axis]
            index.append(position)
        return tuple(index)

    def cell_box(self, cell: Cell) -> Box:
        """Return the box of a cell, in places, which may be empty."""
        spans = [self.interval(dim, index) for dim, index in enumerate(cell)]
        return Box(tuple(start for start, _ in spans), tuple(size for _, size in spans))

    def largest_cell(self) -> tuple[int, ...]:
        """Return the most indices that a cell has in every dim.

        >>> from .placement import Ragged
        >>> Layout(Mesh((3,)), (Ragged(0, (1, 4, 0)),), (5, 2)).largest_cell()
        (4, 2)
        """
        sizes: list[int] = []
        for extent, cuts in zip(self.shape, self.splits, strict=True):
            for split in cuts:
                extent = max(split.piece(i, extent)[1] for i in split.largest)
            sizes.append(extent)
        return tuple(sizes)

    def interval(self, dim: int, index: int) -> tuple[int, int]:
        """Return start and size, in places, of what an index of the grid has of a dim."""
        cuts = self.splits[dim]
        start, extent = 0, self.shape[dim]
        if not cuts:
            return start, extent
        if len(cuts) == 1:
            return cuts[0].piece(index, extent)
        for split, i in zip(cuts, unravel(index, tuple(s.num_pieces for s in cuts)), strict=True):
            offset, extent = split.piece(i, extent)
            start += offset
        return start, extent

    def cells(self) -> Iterator[Cell]:
        """Yield every cell, empty ones included, in row-major order of the grid."""
        return itertools.product(*(range(n) for n in self.grid))

    def cells_meeting(self, box: Box) -> Iterator[tuple[Cell, Box]]:
        """Yield every cell that shares elements with ``box``, with the box of those elements.

        The cost grows with the number of such cells and of axes, not with the size of the mesh.
        A dealt layout yields a cell several times, with other elements.
        """
        if box.ndim != len(self.shape) or not Box.whole(self.shape).contains(box):
            raise PlacementError(f"box {box} does not lie in a tensor of shape {self.shape}")
        if box.is_empty:
            return
        if not self.is_dealt:
            yield from self._cells_at(box)
            return
        for places in self.placed(box):  # of one range each
            for cell, common in self._cells_at(places):
                yield from ((cell, part) for part, _ in indexed(self.orders, common))

    def _cells_at(self, box: Box) -> Iterator[tuple[Cell, Box]]:
        """Yield the cells that meet a box of places, which is not empty, with what they share."""
        dims: list[list[tuple[int, int, int]]] = []
        for dim, indices in enumerate(self._grid_ranges(box)):
            low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
            spans: list[tuple[int, int, int]] = []
            for index in indices:
                start, size = self.interval(dim, index)
                begin, end = max(start, low), min(start + size, high)
                if begin < end:
                    spans.append((index, begin, end - begin))
            dims.append(spans)
        for chosen in itertools.product(*dims):
            if chosen:
                cell, offsets, sizes = cast("Iterator[tuple[int, ...]]", zip(*chosen, strict=True))
                yield cell, Box(offsets, sizes)
            else:
                yield (), box

    def _grid_ranges(self, box: Box) -> list[range]:
        """Return for every dim which indices of the grid meet a box of places, not an empty one.

        There may be cells between them that are empty.
        """
        return [
            range(self._find(dim, start), self._find(dim, start + size - 1) + 1)
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True))
        ]

    def _find(self, dim: int, position: int) -> int:
        index, extent = 0, self.shape[dim]
        for split in self.splits[dim]:
            i = split.find(position, extent)
            start, extent = split.piece(i, extent)
            position -= start
            index = index * split.num_pieces + i
        return index

    def replica(self, coordinate: Coordinate) -> int:
        """Return which of its cell's replicas a coordinate holds, from 0 to num_replicas - 1."""
        index = 0
        for axis in self.replica_axes:
            index = index * self.mesh.shape[axis] + coordinate[axis]
        return index

    def coordinate(self, cell: Cell, replica: int = 0) -> Coordinate:
        """Return the coordinate that holds a given replica of a cell."""
        if not 0 <= replica < self.num_replicas or not all(
            0 <= i < n for i, n in zip(cell, self.grid, strict=True)
        ):
            raise PlacementError(f"{self} has no replica {replica} of cell {cell}")
        coordinate = [0] * self.mesh.ndim
        shape = tuple(self.mesh.shape[axis] for axis in self.replica_axes)
        for axis, i in zip(self.replica_axes, unravel(replica, shape), strict=True):
            coordinate[axis] = i
        for cuts, index in zip(self.splits, cell, strict=True):
            digits = unravel(index, tuple(split.num_pieces for split in cuts))
            for split, digit in zip(cuts, digits, strict=True):
                coordinate[split.axis] = digit
        return tuple(coordinate)

    def all_ranks(self) -> Sequence[int]:
        """Return the ranks of the mesh."""
        return self.mesh.all_ranks()

    def held_by(self, rank: int, replicas: Container[int] | None = None) -> tuple[Box, ...]:
        """Return the boxes that a rank holds, the only one of which may be empty.

        There is one, of a dealt layout perhaps several; none outside of the mesh, nor where the
        rank has none of some ``replicas`` of it.
        """
        at = self.mesh.coordinate(rank)
        if at is None or (replicas is not None and self.replica(at) not in replicas):
            return ()
        if self.is_dealt:
            return tuple(held for held, _ in self.parts(at))
        return (self.box(at),)

    def pieces_meeting(self, box: Box) -> Iterator[tuple[Sequence[int], Box, Box]]:
        """Yield (its ranks, held box, common box) of every held box that meets ``box``."""
        for cell, common in self.cells_meeting(box):
            held = self.cell_box(cell)
            if self.is_dealt:
                held = self._part_with(held, common)
            yield ReplicaRanks(self, cell), held, common

    def _part_with(self, places: Box, within: Box) -> Box:
        """Return the one box, of those that a box of places holds, which has all of another."""
        dims = zip(self.orders, within.offsets, places.offsets, places.sizes, strict=True)
        spans = [
            (start, size) if order is None else order.part_with(index, start, size)
            for order, index, start, size in dims
        ]
        return Box(tuple(start for start, _ in spans), tuple(size for _, size in spans))

    def replica_ranks(self, held: Box) -> Sequence[int]:
        """Return the ranks that hold a box of some rank, by number of replica.

        Those of the first cell if the box is empty.
        """
        if held.is_empty:
            return ReplicaRanks(self, (0,) * held.ndim)
        first = next(self.placed(held))
        return ReplicaRanks(self, tuple(map(self._find, range(held.ndim), first.offsets)))

    def replica_of(self, rank: int, held: Box) -> int:
        """Return which replica of the box that it holds a rank has."""
        return self.replica(self._coordinate_of(rank))

    def giver_number(self, box: Box, taker: int, wanted: Box, num_givers: int) -> int:
        """Return which of so many holders of a box gives of it to a rank of this layout.

        Ranks that follow each other here take from one, or from some that do.
        """
        at = self._coordinate_of(taker)
        number, count = 0, 1
        if self.is_dealt:
            for index, size in zip(at, self.mesh.shape, strict=True):
                number, count = number * size + index, count * size
            return number * num_givers // count
        for index, indices in zip(self.cell(at), self._grid_ranges(box), strict=True):
            number = number * len(indices) + index - indices.start
            count *= len(indices)
        replicas = self.num_replicas
        return (number * replicas + self.replica(at)) * num_givers // (count * replicas)

    def _coordinate_of(self, rank: int) -> Coordinate:
        at = self.mesh.coordinate(rank)
        if at is None:
            raise PlacementError(f"rank {rank} is not in mesh {self.mesh}, and holds nothing")
        return at

    def holders(self, box: Box) -> Iterator[Coordinate]:
        """Yield every coordinate whose local box contains all of ``box``, which is not empty.

        >>> layout = Layout(Mesh((2, 2)), (Shard(0), Replicate()), (4,))
        >>> list(layout.holders(Box((2,), (1,))))
        [(1, 0), (1, 1)]
        """
        shared: dict[Cell, int] = {}
        for cell, common in self.cells_meeting(box):
            shared[cell] = shared.get(cell, 0) + common.numel
        for cell, numel in shared.items():
            if numel == box.numel:
                for replica in range(self.num_replicas):
                    yield self.coordinate(cell, replica)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of mesh, placements in text form, and shape."""
        return {
            "mesh": self.mesh.to_json(),
            "placements": [str(p) for p in self.placements],
            "shape": list(self.shape),
        }

    @classmethod
    def from_json(cls, value: object) -> Layout:
        """Return the layout that ``to_json`` wrote; PlacementError where it is malformed."""
        try:
            fields = cast(dict[str, Any], value)
            return cls(
                Mesh.from_json(fields["mesh"]),
                tuple(parse_placement(text) for text in fields["placements"]),
                ints(fields["shape"], "shape"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlacementError(f"not a layout: {value!r} ({error})") from error

    def __str__(self) -> str:
        return f"{list(self.shape)} ({format_placements(self.placements)}) on {self.mesh}"


class ReplicaRanks(Sequence[int]):
    """The ranks that hold a cell of a layout, by number of replica, worked out one by one."""

    __slots__ = ("cell", "layout")

    def __init__(self, layout: Layout, cell: Cell) -> None:
        self.layout = layout
        self.cell = cell

    def __len__(self) -> int:
        return self.layout.num_replicas

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """Return the rank of a replica."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        if not 0 <= index < len(self):
            raise IndexError(f"{self.layout} has no replica {index} of a cell")
        return self.layout.mesh.rank(self.layout.coordinate(self.cell, index))

    def __iter__(self) -> Iterator[int]:
        mesh, axes = self.layout.mesh, self.layout.replica_axes
        coordinate = list(self.layout.coordinate(self.cell))
        for indices in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
            for axis, index in zip(axes, indices, strict=True):
                coordinate[axis] = index
            yield mesh.rank(tuple(coordinate))

    def __contains__(self, rank: object) -> bool:
        at = self.layout.mesh.coordinate(rank) if isinstance(rank, int) else None
        return at is not None and self.layout.cell(at) == self.cell
