"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_num_pauses = 0
_was_enabled = False


@contextmanager
def paused_collector() -> Generator[None]:
    """Keep the garbage collector from running, in all threads, until the block is left.

    A plan for ten thousand tensors makes so many small objects that the collector would look
    through all objects of the training job again and again; that takes as long as the planning. The
    plans hold no cycles, so nothing piles up. Ranks that are threads may pause it at the same time.
    """
    global _num_pauses, _was_enabled
    with _lock:
        if _num_pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _lock:
            _num_pauses -= 1
            if _num_pauses == 0 and _was_enabled:
                gc.enable()
