"""A tensor of a checkpoint, and the rule that tells who wrote each of its chunks.

The rule is all that the manifest keeps of the plan of a save: from it readers derive which file
holds any part of any cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ..tensors.dtypes import DType


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
