"""Aligned memory that saves use again and again: making it costs more than filling it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator

from ...storage.arena import Arena

BUFFER_BYTES = 16 << 20
NUM_BUFFERS = 3
"""Buffers of one data file that is being written: one fills, one is written, one waits."""

_lock = threading.Lock()
_free: list[Arena] = []


@contextlib.contextmanager
def borrowed_buffers(count: int = NUM_BUFFERS) -> Generator[list[memoryview]]:
    """Lend page-aligned buffers of BUFFER_BYTES each; they are kept for the next to ask.

    Whoever asks for none gets none. What a burst of saves needed beyond one set is given back to
    the system.
    """
    with _lock:
        arenas = [_free.pop() for _ in range(min(count, len(_free)))]
    arenas += [Arena(BUFFER_BYTES) for _ in range(count - len(arenas))]
    try:
        yield [arena.view[:BUFFER_BYTES] for arena in arenas]
    finally:
        with _lock:
            room = max(NUM_BUFFERS - len(_free), 0)
            _free.extend(arenas[:room])


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _free.clear()


os.register_at_fork(after_in_child=_forget_in_child)
