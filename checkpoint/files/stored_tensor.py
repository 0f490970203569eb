"""A tensor of a checkpoint, and the rule that tells who wrote each of its chunks.

The rule is all that the manifest keeps of the plan of a save: from it readers derive which file
holds any part of any cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ..tensors.dtypes import DType
from ..tensors.sink import Sink


class Recipe(Protocol):
    """How the elements of a tensor that is stored nowhere are made of others."""

    @property
    def in_any_order(self) -> bool:
        """Whether parts may come in any order, as they do from ranks that read for each other."""
        ...

    def parts(
        self, box: Box, sink: Sink, *, exact: bool = False
    ) -> Iterable[tuple[StoredTensor | None, Box, Sink]]:
        """Yield boxes of other tensors, with sinks that bring their elements into ``sink``.

        ``sink`` takes the elements of ``box``, which is not empty. In the place of a tensor None
        stands for a box of a sink that is to be filled with zero bits. Boxes hold nothing beside
        what is needed if they are to be ``exact``. Nothing is changed yet.
        """
        ...


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
    recipe: Recipe | None = None
    """How it is made of others, if it is not stored. Then the layout says nothing of files."""
    stored_as: str | None = None
    """Name under which data files have the elements, if that was another one when they were
    written."""
    is_plain: bool | None = None
    """Whether it was a tensor of every rank and no distributed one; None where that was not noted.
    New optimizer state gets this form again."""
    order: tuple[int, ...] | None = None
    """Order of its dims in memory, where that was not row-major: new state has it again."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_name(self) -> str:
        """Name under which data files have the elements; what is in no file has none like it."""
        if self.stored_as is not None:
            return self.stored_as
        return self.same_as or (self.name if self.recipe is None else f"[{self.name}]")

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
        if 0 in self.shape:
            yield from (whole for writer, whole in self.chunks() if writer == rank)
            return
        for held in self.layout.held_by(rank, self.writers):
            if len(self.writers) == 1:
                if not held.is_empty:
                    yield held
                continue
            replica = self.layout.replica_of(rank, held)
            for number in () if held.is_empty else self._slices_meeting(held, held):
                if self.writers[number] == replica:
                    yield self._slice(held, number)

    def chunks(self) -> Iterator[tuple[int, Box]]:
        """Yield (writing rank, chunk) of every chunk; a tensor of size 0 is one empty chunk."""
        whole = Box.whole(self.shape)
        if whole.is_empty:
            ranks = self.layout.replica_ranks(whole)
            if ranks:
                yield ranks[self.writers[0]], whole
            return
        for rank, chunk, _ in self.chunks_meeting(whole):
            yield rank, chunk

    def chunks_meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield (writing rank, chunk, common box) of every chunk that shares elements."""
        for ranks, held, common in self.layout.pieces_meeting(box):
            if len(self.writers) == 1:
                yield ranks[self.writers[0]], held, common
                continue
            for number in self._slices_meeting(held, common):
                part = self._slice(held, number)
                both = part.intersect(common)
                if both is not None:
                    yield ranks[self.writers[number]], part, both

    def _slices_meeting(self, cell: Box, box: Box) -> range:
        """Return which slices of a cell, which is not empty, meet a box in it."""
        step = -(-cell.sizes[self.cut] // len(self.writers))
        start = box.offsets[self.cut] - cell.offsets[self.cut]
        return range(start // step, -(-(start + box.sizes[self.cut]) // step))

    def _slice(self, cell: Box, number: int) -> Box:
        return cell.chunk(self.cut, len(self.writers), number)
