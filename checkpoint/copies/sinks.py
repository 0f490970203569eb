"""Sinks that bring the elements of a box of one tensor to where another one has them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from ...dtensor.geometry.box import Box
from ..tensors.sink import Array, Sink
from .boxes import source_boxes
from .copies import Copy, box_copy
from .meeting import through


class PlacingSink:
    """Stores the elements of a box of a source where a copy puts them in a wider sink.

    A copy of one run is a part of the memory of that sink, if it has any: it is read into.
    """

    def __init__(
        self, sink: Sink, sizes: tuple[int, ...], itemsize: int, box: Box, copy: Copy
    ) -> None:
        """``copy`` goes from a source of the sizes of ``box`` to a target of ``sizes``."""
        self._sink = sink
        self._sizes = sizes
        self._itemsize = itemsize
        self._box = box
        self._copy = copy
        self._is_run = copy.is_run and copy.numel == box.numel
        self.is_memory = sink.is_memory and self._is_run
        """Whether elements may be read straight into the memory of the sink."""

    def memory(self) -> memoryview | None:
        """Return the bytes of a run."""
        memory = self._sink.memory() if self._is_run else None
        if memory is None:
            return None
        start = self._copy.start * self._itemsize
        return memory[start : start + self._copy.numel * self._itemsize]

    def put(self, part: Box, items: Array) -> None:
        """Store ``items`` of a part of the box."""
        memory = self._sink.memory() if self._sink.is_memory else None
        flat = np.ascontiguousarray(items).reshape(-1)
        for copy in self._copies(part):
            if memory is not None:
                sizes = [size for size, _, _ in copy.loops]
                taken = _view(flat, copy.source_start, sizes, [loop.of for loop in copy.loops])
                target = np.frombuffer(memory, flat.dtype)
                _view(target, copy.start, sizes, [loop.to for loop in copy.loops])[...] = taken
                continue
            for box, part_copy in source_boxes(copy.inverse(), self._sizes):
                taken = _ordered(flat, part_copy.inverse())
                self._sink.put(box, taken.reshape(box.sizes))

    def _copies(self, part: Box) -> Iterable[Copy]:
        """Return the copies from a part of the box, which is all of it where that is small."""
        if part.sizes == self._box.sizes:
            return (self._copy,)
        within = box_copy("", part, self._box.sizes)
        return [copy.inverse() for copy in through(within, self._inverse)]

    @cached_property
    def _inverse(self) -> list[Copy]:
        return [self._copy.inverse()]


def _ordered(flat: Array, copy: Copy) -> Array:
    """Return the elements of a copy in the order of its target."""
    sizes, strides = [loop.size for loop in copy.loops], [loop.of for loop in copy.loops]
    return _view(flat, copy.source_start, sizes, strides)


def _view(flat: Array, start: int, sizes: list[int], strides: list[int]) -> Array:
    """Return a view of a contiguous array with strides in elements."""
    steps: Any = [stride * flat.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(flat[start:], sizes, steps)
