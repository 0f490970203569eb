"""Where the bytes of a tensor, or of a part of one, come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

PIECE_BYTES = 16 << 20
"""Most bytes that a source hands over at once, which bounds the memory of a save."""


class Source(Protocol):
    """Where the bytes of one chunk come from."""

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the chunk's bytes in row-major order, at most ``max_bytes`` at a time.

        A piece is one-dimensional, of single bytes, and may be reused once the next is asked for.
        """
        ...
