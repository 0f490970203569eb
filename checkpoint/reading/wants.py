"""What is to be read: boxes of stored tensors, and where their elements go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...dtensor.geometry.box import Box
from ..files.stored_tensor import StoredTensor
from ..tensors.dtypes import items_of
from ..tensors.sink import Array, Sink
from ..tensors.source import PIECE_BYTES


@dataclass(frozen=True, slots=True)
class ArraySink:
    """Fills a contiguous array of elements (``DType.items``)."""

    array: Array

    @property
    def is_memory(self) -> bool:
        """Return True."""
        return True

    def memory(self) -> memoryview:
        """Return the bytes of the array."""
        return self.array.reshape(-1).view(np.uint8).data

    def put(self, part: Box, items: Array) -> None:
        """Store ``items`` at ``part``."""
        self.array[part.slices] = items


@dataclass(frozen=True, slots=True)
class MemorySink:
    """Fills bytes with those of a chunk, as they lie there."""

    data: memoryview
    is_memory = True

    def memory(self) -> memoryview:
        """Return them."""
        return self.data

    def put(self, part: Box, items: Array) -> None:
        """Store ``items`` at ``part`` of the bytes."""
        [offset] = part.offsets
        self.data[offset : offset + items.nbytes] = items.reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A box of a tensor and where its elements go."""

    tensor: StoredTensor
    box: Box
    sink: Sink
    made_for: str = ""
    """Name of the tensor that has a recipe, if this is a part of it."""

    @property
    def name(self) -> str:
        """Name of the tensor that is asked for."""
        return self.made_for or self.tensor.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Elements that come from no file: all their bits are zero."""

    name: str
    """Of the tensor that is asked for."""
    itemsize: int
    box: Box
    """In the coordinates of the sink."""
    sink: Sink

    def run(self) -> None:
        """Store them, a piece at a time."""
        for part in self.box.parts(PIECE_BYTES // self.itemsize):
            zero = np.zeros((), dtype=items_of(self.itemsize))
            self.sink.put(part, np.broadcast_to(zero, part.sizes))


def stored_wants(wants: Iterable[Want], *, exact: bool = False) -> Iterator[Want | Fill]:
    """Yield wants of stored tensors, in the place of those that have a recipe.

    Their boxes hold nothing beside what is needed if they are to be ``exact``.
    """
    for want in wants:
        recipe = want.tensor.recipe
        if recipe is None:
            yield want
        elif not want.box.is_empty:
            name = want.name
            for tensor, box, sink in recipe.parts(want.box, want.sink, exact=exact):
                if tensor is None:
                    itemsize = want.tensor.dtype.itemsize
                    yield Fill(name=name, itemsize=itemsize, box=box, sink=sink)
                else:
                    yield from stored_wants(
                        [Want(tensor=tensor, box=box, sink=sink, made_for=name)], exact=exact
                    )
