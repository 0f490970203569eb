"""The codec of blocks: the bytes of each place in the elements together, those that shrink by zstd.

Of floating-point numbers the bytes of exponents are alike and those of mantissas are not. Apart,
the former shrink to a third and the latter are stored as they are, at no cost. A stored block is as
long as the block itself where nothing shrinks, and is the block then; else it is

::

    4 * width bytes   the stored length of every plane, little endian
    then              the planes, back to back: as they are, or as shorter zstd frames

Plane i of a block has its bytes i, i + width, i + 2 * width and so on.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zstandard

from ..state.limits import MAX_BLOCK_BYTES

MAX_WINDOW_BYTES = MAX_BLOCK_BYTES
"""Of a frame: what a decoder may have to keep of it."""
LEAST_BYTES = 4096
"""Shorter blocks are stored as they are: there are many, and little is saved."""

_GAIN = 0.98
"""What does not shrink to this is stored as it is."""
_SCRATCH_BYTES = 16 << 20
_MOST_KEPT = 16

# As good as no search for repetitions, of which numbers have none: that is what takes time.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, window_log=17, write_content_size=False
)


class Codec:
    """Encodes and decodes blocks, one at a time, in memory of its own that is used again.

    >>> import random
    >>> numbers = random.Random(0)
    >>> block = b"".join(bytes([numbers.randrange(256), 63]) for _ in range(4096))
    >>> codec = Codec()
    >>> stored = bytes(codec.encode(memoryview(block), width=2))
    >>> len(block), len(stored) < 4200
    (8192, True)
    >>> found = bytearray(8192)
    >>> codec.decode(memoryview(stored), memoryview(found), width=2)
    >>> found == block
    True
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._memory: Any = np.empty(0, dtype=np.uint8)

    def encode(self, block: memoryview, width: int) -> memoryview:
        """Return how a block of elements of ``width`` bytes is stored.

        That is the block itself where it does not shrink, else memory of this codec, which its next
        call writes to.
        """
        size = len(block)
        if size < LEAST_BYTES:
            return block
        source = np.frombuffer(block, dtype=np.uint8)
        stored = self.memory(size + 4 * width)
        lengths: list[int] = []
        at = 4 * width
        for i, plane_bytes in enumerate(_plane_sizes(size, width)):
            plane = stored[at : at + plane_bytes]
            np.copyto(plane, source[i::width])
            frame = self._compressor.compress(plane)
            if len(frame) <= _GAIN * plane_bytes:
                lengths.append(len(frame))
                stored[at : at + len(frame)] = np.frombuffer(frame, dtype=np.uint8)
            else:
                lengths.append(plane_bytes)
            at += lengths[-1]
        if at > _GAIN * size:
            return block
        struct.pack_into(f"<{width}I", stored.data, 0, *lengths)
        return stored[:at].data

    def decode(self, stored: memoryview, block: memoryview, width: int) -> None:
        """Fill a block of elements of ``width`` bytes from how it is stored.

        Takes no more memory than the block has bytes, whatever frames claim. ValueError where it is
        malformed; the block may then have been written to.
        """
        size = len(block)
        target = np.frombuffer(block, dtype=np.uint8)
        if len(stored) == size:
            np.copyto(target, np.frombuffer(stored, dtype=np.uint8))
            return
        at = 4 * width
        if not at <= len(stored) < size:
            raise ValueError(f"a block of {size} bytes is stored in {len(stored)}")
        for i, (plane_bytes, length) in enumerate(
            zip(_plane_sizes(size, width), struct.unpack_from(f"<{width}I", stored), strict=True)
        ):
            part = stored[at : at + length]
            if len(part) != length or length > plane_bytes:
                raise ValueError(f"a plane of {plane_bytes} bytes is stored in {length} at {at}")
            if length < plane_bytes:
                part = self._unpacked(part, plane_bytes)
            target[i::width] = np.frombuffer(part, dtype=np.uint8)
            at += length
        if at != len(stored):
            raise ValueError(f"a block is stored in {len(stored)} bytes, its planes in {at}")

    def _unpacked(self, frame: memoryview, size: int) -> bytes:
        try:
            # What a frame claims would be allocated, whatever max_output_size says.
            told = zstandard.get_frame_parameters(frame).content_size
            if told not in (size, zstandard.CONTENTSIZE_UNKNOWN):
                raise ValueError(f"a frame claims {told} bytes for a plane of {size}")
            found = self._decompressor.decompress(
                frame, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise ValueError(f"a plane of {size} bytes does not unpack: {error}") from None
        if len(found) != size:
            raise ValueError(f"a plane of {size} bytes unpacks to {len(found)}")
        return found

    def memory(self, size: int) -> Any:
        """Return so many bytes, which the next call of any method may write to."""
        if len(self._memory) < size:
            self._memory = np.empty(size, dtype=np.uint8)
        return self._memory[:size]

    @property
    def is_small(self) -> bool:
        """Whether it has no more memory than may be kept."""
        return len(self._memory) <= _SCRATCH_BYTES + (1 << 10)


def _plane_sizes(size: int, width: int) -> Iterator[int]:
    return ((size - i + width - 1) // width for i in range(width))


_lock = threading.Lock()
_free: list[Codec] = []


@contextmanager
def borrowed_codec() -> Generator[Codec]:
    """Lend a codec to one thread; it is kept for the next to ask."""
    with _lock:
        codec = _free.pop() if _free else None
    codec = codec or Codec()
    try:
        yield codec
    finally:
        with _lock:
            if len(_free) < _MOST_KEPT and codec.is_small:
                _free.append(codec)


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _free.clear()


os.register_at_fork(after_in_child=_forget_in_child)
