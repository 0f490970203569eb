"""Who writes what: every rank derives the same answer from the global state.

Replicas share the work. Tensors that lie on the same mesh with the same replica axes form a
group; within it each tensor is given to one replica index, largest first, always to the least
loaded one (LPT). Only global sizes decide, so all cells of the grid decide alike without talking,
and the index alone, kept in the manifest, tells readers which rank wrote any cell.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..dtensor.box import Box
from ..dtensor.irregular import IrregularLayout
from ..dtensor.layout import Layout
from ..dtensor.mesh import Mesh
from .dtypes import DType
from .spec import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint and the rule that tells who wrote each of its chunks."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | IrregularLayout
    writer: int = 0
    """Replica index that writes every cell; chunks of irregular layouts fall to the lowest rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def key(self, box: Box) -> str:
        """Return the key of a chunk in its data file: the name, with the box of a part."""
        return self.name if box == Box.whole(self.shape) else f"{self.name}{box}"

    def chunks_of(self, rank: int) -> Iterator[Box]:
        """Yield the boxes that ``rank`` writes; a tensor of size 0 is one empty chunk."""
        layout = self.layout
        if isinstance(layout, IrregularLayout):
            yield from (box for writer, box in layout.distinct_pieces() if writer == rank)
            return
        coordinate = layout.mesh.coordinate(rank)
        if coordinate is None or layout.replica(coordinate) != self.writer:
            return
        box = layout.box(coordinate)
        if 0 in self.shape:
            if not any(layout.cell(coordinate)):
                yield Box.whole(self.shape)
        elif not box.is_empty:
            yield box

    def chunks_meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield (writing rank, chunk, common box) of every chunk that shares elements."""
        layout = self.layout
        if isinstance(layout, IrregularLayout):
            yield from layout.pieces_meeting(box)
            return
        for cell, common in layout.cells_meeting(box):
            rank = layout.mesh.rank(layout.coordinate(cell, self.writer))
            yield rank, layout.cell_box(cell), common


def assign_writers(tensors: Iterable[GlobalTensor]) -> tuple[StoredTensor, ...]:
    """Return every tensor with its writing replica, in the given order."""
    tensors = tuple(tensors)
    writers: dict[str, int] = {}
    loads: dict[tuple[Mesh, tuple[int, ...]], list[tuple[int, int]]] = {}
    for tensor in sorted(tensors, key=lambda t: (-_cell_bytes(t), t.name)):
        layout = tensor.layout
        if isinstance(layout, IrregularLayout) or layout.num_replicas == 1:
            continue
        group = (layout.mesh, layout.replica_axes)
        heap = loads.setdefault(group, [(0, replica) for replica in range(layout.num_replicas)])
        load, replica = heap[0]
        heapq.heapreplace(heap, (load + _cell_bytes(tensor), replica))
        writers[tensor.name] = replica
    return tuple(
        StoredTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            layout=tensor.layout,
            writer=writers.get(tensor.name, 0),
        )
        for tensor in tensors
    )


def _cell_bytes(tensor: GlobalTensor) -> int:
    """Return the bytes of the largest even cell, the same number on every rank."""
    if isinstance(tensor.layout, IrregularLayout):
        return 0
    numel = 1
    for size, cells in zip(tensor.shape, tensor.layout.grid, strict=True):
        numel *= -(-size // cells)
    return numel * tensor.dtype.itemsize
