"""Checksums of a data file: one per block of its data region.

The table is the last entry of the file, so a file streams out in one pass, and a partial read
verifies exactly the blocks that it touched. The manifest holds the digest of the table.
"""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16
DEFAULT_BLOCK_BYTES = 1 << 20


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 16-byte xxh3_128 digest of some bytes."""
    return xxhash.xxh3_128_digest(data)


def num_blocks(data_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a data region has."""
    return -(-data_bytes // block_bytes)


class BlockHasher:
    """Digests of consecutive blocks of a stream of bytes."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._room = block_bytes
        self._hash = xxhash.xxh3_128()
        self._digests: list[bytes] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes; ``data`` is one-dimensional and of single bytes."""
        start = 0
        while start < len(data):
            part = data[start : start + self._room]
            self._hash.update(part)
            start += len(part)
            self._room -= len(part)
            if self._room == 0:
                self._close_block()

    def _close_block(self) -> None:
        self._digests.append(self._hash.digest())
        self._hash.reset()
        self._room = self._block_bytes

    def table(self) -> bytes:
        """End the last block and return all digests, one after the other."""
        if self._room < self._block_bytes:
            self._close_block()
        return b"".join(self._digests)
