"""Where the elements that are read go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ...dtensor.geometry.box import Box

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
else:
    Array = Any  # manifests are read without numpy


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
        """Store ``items``, as wide as an element (``DType.items``), at ``part`` of the wanted box.

        Called from several threads at once, for disjoint parts; ``items`` is valid only during
        the call. May be called for some parts even where there is ``memory``.
        """
        ...


class EarlySink:
    """Base of sinks that others wait for: what goes to them is read before all else."""
