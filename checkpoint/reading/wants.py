"""What is to be read: boxes of stored tensors, and where their elements go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...dtensor.geometry.box import Box
from ..files.stored_tensor import StoredTensor

Array = np.ndarray[Any, Any]


class Sink(Protocol):
    """Where the elements of a wanted box go."""

    @property
    def is_memory(self) -> bool:
        """Whether there will be ``memory`` when the reads are executed; asked when planning."""
        ...

    def memory(self) -> memoryview | None:
        """Return the bytes of the box, which is not empty, if they are writable host memory.

        In row-major order, one-dimensional, of single bytes; None where elements have to be
        ``put``. Elements are read straight into it, so it may hold damaged ones after a failure.
        """
        ...

    def put(self, part: Box, items: Array) -> None:
        """Store ``items``, of unsigned ints as wide as an element, at ``part`` of the wanted box.

        Called from several threads at once, for disjoint parts; ``items`` is valid only during
        the call. May be called for some parts even where there is ``memory``.
        """
        ...


@dataclass(frozen=True, slots=True)
class ArraySink:
    """Fills a contiguous array of unsigned ints as wide as an element."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A box of a stored tensor and where its elements go."""

    tensor: StoredTensor
    box: Box
    sink: Sink
