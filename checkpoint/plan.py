"""Who writes what: every rank derives the same answer from the global state.

Replicas share the work. Tensors that lie on the same mesh with the same replica axes form a
group; within it each tensor is given to one replica index, largest first, always to the least
loaded one (LPT). A tensor too large for a fair deal is cut into slices first, which are dealt out
one by one. Only global sizes decide, so all cells of the grid decide alike without talking, and the
indices alone, kept in the manifest, tell readers which rank wrote any part of any cell.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..dtensor.box import Box
from ..dtensor.irregular import IrregularLayout
from ..dtensor.layout import Layout
from ..dtensor.mesh import Mesh
from .dtypes import DType
from .spec import GlobalTensor

MIN_SLICE_BYTES = 4 << 20
"""Tensors are not cut into smaller slices than this."""
_SLICES_PER_REPLICA = 8
"""Slices are at least this part of what a replica has to write, which bounds their number."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint and the rule that tells who wrote each of its chunks.

    A named tuple, because checkpoints have ten thousands of them.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | IrregularLayout
    writers: tuple[int, ...] = (0,)
    """Replica index that writes each slice of every cell; most tensors are one slice. Chunks of
    irregular layouts fall to the lowest rank."""
    cut: int = 0
    """The dim along which several slices cut a cell, into even chunks as an axis would."""
    same_as: str | None = None
    """Name of the tensor under which the elements are stored; this one is tied to it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_name(self) -> str:
        """Name under which data files have the elements."""
        return self.same_as or self.name

    @property
    def stored_bytes(self) -> int:
        """Bytes that are stored for this name: none if it is tied to another one."""
        return self.num_bytes if self.same_as is None else 0

    def key(self, box: Box) -> str:
        """Return the key of a chunk in its data file: the name, with the box of a part."""
        return self.stored_name if box.sizes == self.shape else f"{self.stored_name}{box}"

    def chunks_of(self, rank: int) -> Iterator[Box]:
        """Yield the boxes that ``rank`` writes; a tensor of size 0 is one empty chunk."""
        if self.same_as is not None:
            return
        layout = self.layout
        if isinstance(layout, IrregularLayout):
            yield from (box for writer, box in layout.distinct_pieces() if writer == rank)
            return
        coordinate = layout.mesh.coordinate(rank)
        if coordinate is None:
            return
        replica = layout.replica(coordinate)
        if replica not in self.writers:
            return
        if 0 in self.shape:
            if not any(layout.cell(coordinate)) and replica == self.writers[0]:
                yield Box.whole(self.shape)
            return
        box = layout.box(coordinate)
        if not box.is_empty:
            for number in self._slices_meeting(box, box):
                if self.writers[number] == replica:
                    yield self._slice(box, number)

    def chunks_meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield (writing rank, chunk, common box) of every chunk that shares elements."""
        layout = self.layout
        if isinstance(layout, IrregularLayout):
            yield from layout.pieces_meeting(box)
            return
        for cell, common in layout.cells_meeting(box):
            chunk = layout.cell_box(cell)
            if len(self.writers) == 1:
                yield layout.mesh.rank(layout.coordinate(cell, self.writers[0])), chunk, common
                continue
            for number in self._slices_meeting(chunk, common):
                part = self._slice(chunk, number)
                both = part.intersect(common)
                if both is not None:
                    coordinate = layout.coordinate(cell, self.writers[number])
                    yield layout.mesh.rank(coordinate), part, both

    def _slices_meeting(self, cell: Box, box: Box) -> range:
        """Return which slices of a cell, which is not empty, meet a box in it."""
        if len(self.writers) == 1:
            return range(1)
        step = -(-cell.sizes[self.cut] // len(self.writers))
        start = box.offsets[self.cut] - cell.offsets[self.cut]
        return range(start // step, -(-(start + box.sizes[self.cut]) // step))

    def _slice(self, cell: Box, number: int) -> Box:
        count = len(self.writers)
        if count == 1:
            return cell
        return cell.chunk(self.cut, count, number)


def assign_writers(tensors: Iterable[GlobalTensor]) -> tuple[StoredTensor, ...]:
    """Return every tensor with its writing replicas, in the given order."""
    tensors = tuple(tensors)
    groups: dict[tuple[Mesh, tuple[int, ...]], list[_Cells]] = {}
    for tensor in tensors:
        layout = tensor.layout
        if isinstance(layout, Layout) and layout.num_replicas > 1 and tensor.same_as is None:
            group = groups.setdefault((layout.mesh, layout.replica_axes), [])
            group.append(_Cells.of(tensor, layout))
    dealt: dict[str, tuple[int, tuple[int, ...]]] = {}
    for (mesh, axes), members in groups.items():
        _deal(members, math.prod(mesh.shape[axis] for axis in axes), dealt)
    stored: list[StoredTensor] = []
    for tensor in tensors:
        cut, writers = dealt.get(tensor.same_as or tensor.name, (0, (0,)))
        stored.append(
            StoredTensor(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                layout=tensor.layout,
                writers=writers,
                cut=cut,
                same_as=tensor.same_as,
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
    members: list[_Cells], num_replicas: int, dealt: dict[str, tuple[int, tuple[int, ...]]]
) -> None:
    """Deal the tensors of a group out to its replicas; ``dealt`` gets dim and replicas by name."""
    fair = sum(cells.num_bytes for cells in members) / num_replicas
    granule = max(MIN_SLICE_BYTES, fair / _SLICES_PER_REPLICA)
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
        dealt[name] = (cuts[name], tuple(found))
