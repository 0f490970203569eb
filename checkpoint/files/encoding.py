"""Blocks of a data file on their way to it: gathered, encoded in threads, handed on in order."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from ..compression.codec import Codec
from .blocks import LENGTH_BYTES, digest

OnEncoded = Callable[[float, int], None]
"""Takes the seconds for which a file has waited for the codec, and the bytes it was given."""

_MOST_THREADS = 8


def num_encoders() -> int:
    """Return how many threads of a process encode: its share of the cores, and no more than 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = (cores or 1) // max(int(told) if told.isdecimal() else 1, 1)
    return min(max(share, 1), _MOST_THREADS)


class _Slot:
    """A block, and then how it is stored."""

    def __init__(self, block_bytes: int) -> None:
        self.memory: Any = np.empty(block_bytes, dtype=np.uint8)
        self.codec = Codec()
        self.filled = 0
        self.width = 1
        self.is_done = threading.Event()
        self.stored = memoryview(b"")
        self.digest = b""
        self.failure: BaseException | None = None

    def encode(self) -> None:
        try:
            block = self.memory[: self.filled].data
            self.digest = digest(block)
            self.stored = self.codec.encode(block, self.width)
        except BaseException as error:
            self.failure = error
        self.is_done.set()


class BlockEncoder:
    """Takes the bytes of chunks, one after the other, and hands on how their blocks are stored.

    It copies them, so memory may be used again once ``update`` has returned, and holds a few blocks
    for each thread. Without a thread beside the caller's, whether there is one core or none can be
    started, it encodes in that.
    """

    def __init__(
        self, block_bytes: int, put: Callable[[memoryview], None], num_threads: int | None = None
    ) -> None:
        """``put`` is called with the stored bytes of every block, in order, by the caller."""
        wanted = num_encoders() if num_threads is None else num_threads
        self._block_bytes = block_bytes
        self._put = put
        self._jobs: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._threads = _started(self._run, wanted) if wanted > 1 else []
        self._free = [_Slot(block_bytes) for _ in range(2 * len(self._threads) + 1)]
        self._under_way: deque[_Slot] = deque()
        self._filling: _Slot | None = None
        self._digests: list[bytes] = []
        self._lengths: list[int] = []
        self.num_bytes = 0
        """Bytes of blocks that have been ended."""
        self.waited_seconds = 0.0
        """What the caller has spent on encoding, or on waiting for it."""

    def _run(self) -> None:
        while (slot := self._jobs.get()) is not None:
            slot.encode()

    def update(self, data: memoryview, width: int) -> None:
        """Take the next bytes of a chunk whose elements have ``width`` bytes."""
        items = np.frombuffer(data, dtype=np.uint8)
        while len(items):
            slot = self._filling = self._filling or self._next_slot(width)
            part = items[: self._block_bytes - slot.filled]
            np.copyto(slot.memory[slot.filled : slot.filled + len(part)], part)
            slot.filled += len(part)
            items = items[len(part) :]
            if slot.filled == self._block_bytes:
                self.end_chunk()

    def end_chunk(self) -> None:
        """End the block that is being filled, if any."""
        slot, self._filling = self._filling, None
        if slot is None:
            return
        self.num_bytes += slot.filled
        self._under_way.append(slot)
        if self._threads:
            self._jobs.put(slot)
        else:
            began = time.perf_counter()
            slot.encode()
            self.waited_seconds += time.perf_counter() - began

    def _next_slot(self, width: int) -> _Slot:
        if not self._free:
            self._hand_on()
        slot = self._free.pop()
        slot.filled, slot.width = 0, width
        slot.is_done.clear()
        return slot

    def _hand_on(self) -> None:
        slot = self._under_way.popleft()
        began = time.perf_counter()
        slot.is_done.wait()
        self.waited_seconds += time.perf_counter() - began
        if slot.failure is not None:
            raise slot.failure
        self._digests.append(slot.digest)
        self._lengths.append(len(slot.stored))
        self._put(slot.stored)
        self._free.append(slot)

    def finish(self) -> None:
        """Hand on all that is under way; every chunk has been ended."""
        while self._under_way:
            self._hand_on()

    @property
    def stored_bytes(self) -> int:
        """Bytes that have been handed on."""
        return sum(self._lengths)

    def table(self) -> bytes:
        """Return the digests of all blocks, and then their stored lengths."""
        lengths = (length.to_bytes(LENGTH_BYTES, "little") for length in self._lengths)
        return b"".join(self._digests) + b"".join(lengths)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _started(run: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start threads, and return as many as the system has given.

    No executor: they refuse work while the interpreter ends, when a save may still be under way.
    """
    threads: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=run, name="dtckpt-encode", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    return threads
