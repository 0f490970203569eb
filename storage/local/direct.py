"""Direct I/O: from memory to the device without a copy in the page cache.

It saves the processor a copy and the kernel a writeback, where a file system has it and the device
is fast. Whether it does is found out by a probe, once for each device.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time

from ..arena import Arena, address_of
from .posix import preallocate, write_at

ALIGNMENT = 4096
"""Memory, offset and length of direct writes are multiples of this; devices ask for no more."""

_PROBE_BYTES = 16 << 20
_PROBE_ROUNDS = 3
_PROBE_SECONDS = 0.2
_MARGIN = 1.1
"""Direct I/O is taken even if it seems that much slower: it leaves the processor and the page cache
to the training."""

_lock = threading.Lock()
_known: dict[int, bool] = {}


def direct_io_pays(directory: str) -> bool:
    """Whether large files in ``directory``, which exists, are better written directly.

    Writes a nameless file the first time that it is asked about a device; any failure means no.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "O_TMPFILE"):
        return False
    try:
        device = os.stat(directory).st_dev
        with _lock:
            if device not in _known:
                _known[device] = _probe(directory)
            return _known[device]
    except OSError:
        return False


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_in_child)


def _probe(directory: str) -> bool:
    direct: list[float] = []
    buffered: list[float] = []
    try:
        with Arena(_PROBE_BYTES) as arena:
            arena.view[:] = bytes(len(arena.view))
            start = time.perf_counter()
            for _ in range(_PROBE_ROUNDS):
                direct.append(_time_of(directory, arena.view, os.O_DIRECT))
                buffered.append(_time_of(directory, arena.view, 0))
                if time.perf_counter() - start > _PROBE_SECONDS:
                    break  # on a slow device one round tells enough
    except OSError:
        return False
    return min(direct) <= _MARGIN * min(buffered)


def _time_of(directory: str, view: memoryview, flag: int) -> float:
    # Without a name it is gone when it is closed, whatever happens.
    fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC | flag, 0o600)
    try:
        start = time.perf_counter()
        preallocate(fd, len(view))
        write_at(fd, view, 0)
        os.fsync(fd)
        return time.perf_counter() - start
    finally:
        os.close(fd)


class DirectWriter:
    """Writes to a file directly as long as everything is aligned, and then as usual.

    A file is never written both ways at once: the first write that is not aligned ends direct I/O,
    but for the aligned bytes that it begins with. That is how the odd end of a file gets there.
    """

    def __init__(self, fd: int) -> None:
        """Switch ``fd`` to direct I/O; ``OSError`` where the file system has none."""
        self._fd = fd
        self._switch(on=True)
        self._is_direct = True

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at ``offset``."""
        if self._is_direct:
            done = self._write_aligned(view, offset)
            view, offset = view[done:], offset + done
            if not view.nbytes:
                return
            self._switch(on=False)
            self._is_direct = False
        write_at(self._fd, view, offset)

    def _write_aligned(self, view: memoryview, offset: int) -> int:
        length = view.nbytes - view.nbytes % ALIGNMENT
        if not length or offset % ALIGNMENT or view.readonly or address_of(view) % ALIGNMENT:
            return 0
        try:
            write_at(self._fd, view[:length], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a device that asks for more than we know of
                raise
            return 0
        return length

    def _switch(self, *, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
