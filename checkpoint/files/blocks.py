"""Checksums of a data file: one per block of every chunk.

Blocks are counted from the first byte of a chunk and never span two, so the digests of a chunk tell
its content wherever it lies, and reading one touches no neighbour. The table of all digests is the
last entry of the file, so a file streams out in one pass, and a partial read verifies exactly the
blocks that it touched. The manifest holds the digest of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

DIGEST_BYTES = 16
LENGTH_BYTES = 4
"""Of the stored length of a block, in the tables of compressed files."""
DEFAULT_BLOCK_BYTES = 1 << 20


def digest(data: bytes | bytearray | memoryview, *more: bytes | memoryview) -> bytes:
    """Return the 16-byte xxh3_128 digest of some bytes, of all of them in a row."""
    if not more:
        return xxhash.xxh3_128_digest(data)
    whole = xxhash.xxh3_128(data)
    for part in more:
        whole.update(part)
    return whole.digest()


def num_blocks(chunk_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a chunk has; an empty one has none."""
    return -(-chunk_bytes // block_bytes)


class BlockHasher:
    """Digests of the blocks of a stream of chunks."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._room = block_bytes
        self._hash = xxhash.xxh3_128()
        self._digests: list[bytes] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes of a chunk; ``data`` is one-dimensional and of single bytes."""
        start, size = 0, len(data)
        while start < size:
            if self._room == self._block_bytes and size - start >= self._block_bytes:
                end = start + self._block_bytes
                self._digests.append(digest(data[start:end]))
            else:
                end = min(start + self._room, size)
                self._hash.update(data[start:end])
                self._room -= end - start
                if self._room == 0:
                    self._close_block()
            start = end

    def end_chunk(self) -> None:
        """End the chunk, and with it its last block."""
        if self._room < self._block_bytes:
            self._close_block()

    def _close_block(self) -> None:
        self._digests.append(self._hash.digest())
        self._hash.reset()
        self._room = self._block_bytes

    @property
    def digests(self) -> Sequence[bytes]:
        """Digests of all blocks that have been ended."""
        return self._digests

    def table(self) -> bytes:
        """Return all digests, one after the other; every chunk has been ended."""
        return b"".join(self._digests)
