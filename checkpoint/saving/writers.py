"""Who writes what: every rank derives the same answer from the global state.

Replicas share the work. Tensors that lie on the same mesh with the same replica axes form a
group; within it each tensor is given to one replica index, largest first, always to the least
loaded one (LPT). A tensor too large for a fair deal is cut into slices first, which are dealt out
one by one. Only global sizes decide, so all cells of the grid decide alike without talking, and the
indices alone, kept in the manifest, tell readers which rank wrote any part of any cell.

Who writes the part of a rank that is lost is derived as well. Ranks that hold the same cells of all
tensors form a class, in which each stands in for the ones before it, by their numbers, in a circle.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout, ReplicaRanks
from ...dtensor.geometry.mesh import Mesh
from ..files.stored_tensor import StoredTensor
from ..tensors.spec import GlobalTensor

MIN_SLICE_BYTES = 4 << 20
"""Tensors are not cut into smaller slices than this."""
_SLICES_PER_REPLICA = 8
"""Slices are at least this part of what a replica has to write, which evens out what they write."""
_MAX_SLICES = 80_000
"""About as many slices there are of a group at most: the manifest names the writer of each."""


def assign_writers(tensors: Iterable[GlobalTensor]) -> tuple[StoredTensor, ...]:
    """Return every tensor with its writing replicas, in the given order."""
    tensors = tuple(tensors)
    groups: dict[tuple[Mesh, tuple[int, ...]], list[_Cells]] = {}
    for tensor in tensors:
        layout = tensor.layout
        if isinstance(layout, Layout) and layout.num_replicas > 1 and tensor.same_as is None:
            group = groups.setdefault((layout.mesh, layout.replica_axes), [])
            group.append(_Cells.of(tensor, layout))
    dealt: dict[str, tuple[tuple[int, ...], int]] = {}
    for (mesh, axes), members in groups.items():
        _deal(members, math.prod(mesh.shape[axis] for axis in axes), dealt)
    stored: list[StoredTensor] = []
    for t in tensors:
        writers, cut = dealt.get(t.same_as or t.name, ((0,), 0))
        stored.append(
            StoredTensor(
                name=t.name,
                dtype=t.dtype,
                shape=t.shape,
                layout=t.layout,
                writers=writers,
                cut=cut,
                same_as=t.same_as,
                is_plain=t.is_plain,
                order=t.order,
            )
        )
    return tuple(stored)


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a tensor as its replicas deal them out: by the sizes of the largest one."""

    name: str
    sizes: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensor: GlobalTensor, layout: Layout) -> _Cells:
        sizes = tuple(-(-n // cells) for n, cells in zip(tensor.shape, layout.grid, strict=True))
        return cls(tensor.name, sizes, math.prod(sizes) * tensor.dtype.itemsize)

    def cut(self, granule: float) -> tuple[int, int]:
        """Return the dim along which cells are cut and the number of slices."""
        count = int(self.num_bytes // granule)
        if count < 2:
            return 0, 1
        long_enough = (dim for dim, size in enumerate(self.sizes) if size >= count)
        dim = next(long_enough, max(range(len(self.sizes)), key=lambda d: self.sizes[d]))
        size = self.sizes[dim]
        step = -(-size // min(count, size))
        return dim, -(-size // step)  # even chunks are rounded up: there may be fewer then


def _deal(
    members: list[_Cells], num_replicas: int, dealt: dict[str, tuple[tuple[int, ...], int]]
) -> None:
    """Deal the tensors of a group out to its replicas; ``dealt`` gets replicas and dim by name."""
    total = sum(cells.num_bytes for cells in members)
    slices_per_replica = min(_SLICES_PER_REPLICA, _MAX_SLICES / num_replicas)
    granule = max(MIN_SLICE_BYTES, total / num_replicas / slices_per_replica)
    slices: list[tuple[int, str, int]] = []
    cuts: dict[str, int] = {}
    replicas: dict[str, list[int]] = {}
    for cells in members:
        cuts[cells.name], count = cells.cut(granule)
        replicas[cells.name] = [0] * count
        slices += [(-(-cells.num_bytes // count), cells.name, number) for number in range(count)]
    slices.sort(key=lambda s: (-s[0], s[1], s[2]))
    heap = [(0, replica) for replica in range(num_replicas)]
    for num_bytes, name, number in slices:
        load, replica = heap[0]
        heapq.heapreplace(heap, (load + num_bytes, replica))
        replicas[name][number] = replica
    for name, found in replicas.items():
        dealt[name] = tuple(found), cuts[name]


def stand_ins(rank: int, tensors: Sequence[StoredTensor]) -> tuple[int, ...]:
    """Return the ranks that can write a rank's part of shared tensors, the first ones first.

    These are the others of its class. None can where it holds boxes that follow from no mesh.
    """
    return () if _holds_boxes(rank, tensors) else _class_from(rank, tensors)


def stood_in_for(rank: int, tensors: Sequence[StoredTensor], most: int) -> tuple[int, ...]:
    """Return the ranks among whose first stand-ins, so many of each, a rank is."""
    if most == 0:
        return ()  # as in nearly all saves, whose callers wait for this
    before = _class_from(rank, tensors)[::-1][:most]
    return tuple(other for other in before if not _holds_boxes(other, tensors))


def _holds_boxes(rank: int, tensors: Sequence[StoredTensor]) -> bool:
    """Whether a rank holds anything that follows from no mesh."""
    told = (t.layout for t in tensors if isinstance(t.layout, IrregularLayout))
    return any(layout.held_by(rank) for layout in told)


def _class_from(rank: int, tensors: Sequence[StoredTensor]) -> tuple[int, ...]:
    """Return the other ranks of a class from a rank on, those below it last.

    The axes that cut tell which cells a rank holds, of however many tensors.
    """
    layouts: dict[tuple[Mesh, tuple[int, ...]], Layout] = {}
    for tensor in tensors:
        if isinstance(tensor.layout, Layout) and tensor.same_as is None:
            layouts.setdefault((tensor.layout.mesh, tensor.layout.replica_axes), tensor.layout)

    def place(rank: int) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = []
        for mesh, axes in layouts:
            at = mesh.coordinate(rank)
            found.append(at and tuple(i for axis, i in enumerate(at) if axis not in axes))
        return found

    own = place(rank)
    around = [layout for layout, at in zip(layouts.values(), own, strict=True) if at is not None]
    if not around:
        return ()
    fewest = min(around, key=lambda layout: layout.num_replicas)
    cell = fewest.cell(fewest.mesh.coordinate(rank) or ())
    alike = sorted(other for other in ReplicaRanks(fewest, cell) if place(other) == own)
    position = alike.index(rank)
    return (*alike[position + 1 :], *alike[:position])
