"""Messages: what one rank sends to, and receives from, every other one in a round of exchanges.

A message is the elements of all stripes of the round that one rank has read and another one wants,
piece by piece. Sender and receiver derive it alike. It travels in slices of about equal size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..dtensor.box import Box
from .plan import StoredTensor
from .reading import Array
from .stripes import run_boxes

_NOTHING: Array = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a stripe that one rank wants, on the side of the reader or of that rank."""

    stored: StoredTensor
    box: Box
    source: Array = field(default_factory=lambda: _NOTHING)
    """The elements on the side of the reader, nothing on the other."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element as it was saved."""
        return self.stored.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements as they were saved."""
        return self.box.numel * self.stored.dtype.itemsize


def slices(message: Sequence[Piece], number: int, count: int) -> Iterator[tuple[Piece, Box, int]]:
    """Yield the boxes of slice ``number`` of ``count``, and where they begin in the slice."""
    at = 0
    for piece, start, stop in _bounds(message, number, count):
        for box in run_boxes(piece.box, start, stop):
            yield piece, box, at
            at += box.numel * piece.itemsize


def slice_bytes(message: Sequence[Piece], number: int, count: int) -> int:
    """Return the length of a slice of a message."""
    bounds = _bounds(message, number, count)
    return sum((stop - start) * piece.itemsize for piece, start, stop in bounds)


def _bounds(message: Sequence[Piece], number: int, count: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces of a slice, and which of their elements belong to it."""
    sizes = [piece.num_bytes for piece in message]
    total = sum(sizes)
    low, high = total * number // count, total * (number + 1) // count
    end = 0
    for piece, size in zip(message, sizes, strict=True):
        start, end = end, end + size
        if end > low and start < high:
            first, last = max(low - start, 0), min(high - start, size)
            yield piece, first // piece.itemsize, last // piece.itemsize


def pack(message: Sequence[Piece], number: int, count: int, buffer: Array) -> None:
    """Copy a slice of a message into a buffer."""
    for piece, box, start in slices(message, number, count):
        packed = np.ndarray(box.sizes, f"u{piece.itemsize}", buffer=buffer.data, offset=start)
        packed[...] = piece.source[box.relative_to(piece.box).slices]


@dataclass(slots=True)
class Messages:
    """The pieces of one round, by the position that they go to or come from."""

    own: list[Piece] = field(default_factory=list[Piece])
    """Those that this rank reads for itself."""
    outgoing: dict[int, list[Piece]] = field(default_factory=dict[int, list[Piece]])
    incoming: dict[int, list[Piece]] = field(default_factory=dict[int, list[Piece]])

    def num_bytes(self) -> int:
        """Return how much this rank sends or receives, whichever is more."""
        sides = (self.outgoing, self.incoming)
        return max(sum(p.num_bytes for m in side.values() for p in m) for side in sides)
