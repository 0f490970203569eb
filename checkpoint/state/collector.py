"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager


class _Pauses:
    """How many blocks keep the collector from running, and whether it ran before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False

    def begin(self) -> None:
        with self.lock:
            if self.count == 0:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.count += 1

    def end(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0 and self.was_enabled:
                gc.enable()


_pauses = _Pauses()


@contextmanager
def paused_collector() -> Generator[None]:
    """Keep the garbage collector from running, in all threads, until the block is left.

    A plan for ten thousand tensors makes so many small objects that the collector would look
    through all objects of the training job again and again; that takes as long as the planning. The
    plans hold no cycles, so nothing piles up. Ranks that are threads may pause it at the same time.
    A process forked meanwhile collects again at once: its copy of the block may never be left.
    """
    pauses = _pauses
    pauses.begin()
    try:
        yield
    finally:
        pauses.end()


def _forget_in_child() -> None:
    global _pauses
    parent, _pauses = _pauses, _Pauses()
    # Only the thread that forked lives here; if it is in a block, what it ends are the parent's
    # pauses, which count no longer.
    parent.lock.release()
    if parent.count and parent.was_enabled:
        parent.was_enabled = False
        gc.enable()


# Held while a process is forked, the lock keeps the count and the collector in step.
os.register_at_fork(
    before=lambda: _pauses.lock.acquire(),
    after_in_parent=lambda: _pauses.lock.release(),
    after_in_child=_forget_in_child,
)
