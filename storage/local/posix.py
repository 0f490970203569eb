"""The system calls behind the local store, each complete: no short reads, no short writes.

They raise plain ``OSError``. Interrupted calls (EINTR) are repeated by Python itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from ..names import lock_name

_IOV_MAX = 1024
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
_NO_LOCKS = _UNSUPPORTED | {errno.EBADF, errno.ENOLCK}
_LOCK_SECONDS = 30.0
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``."""
    while view.nbytes:
        count = os.pwrite(fd, view, offset)
        if count == 0:
            raise OSError(errno.EIO, f"the system wrote none of {view.nbytes} bytes at {offset}")
        view = view[count:]
        offset += count


def read_at(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill ``views`` one after the other from ``offset`` on.

    Returns the number of bytes filled, which is short only at the end of the file.
    """
    if len(views) == 1 and os.preadv(fd, views, offset) == views[0].nbytes:
        return views[0].nbytes  # nearly always, and there may be very many calls
    pending = deque(view for view in views if view.nbytes)
    filled = 0
    while pending:
        count = os.preadv(fd, list(islice(pending, _IOV_MAX)), offset + filled)
        if count == 0:
            break
        filled += count
        while count:
            head = pending.popleft()
            if count < head.nbytes:
                pending.appendleft(head[count:])
            count -= min(count, head.nbytes)
    return filled


def _system_call() -> Callable[[int, int, int, int], int] | None:
    """Return fallocate(2), where the system has it."""
    library = ctypes.CDLL(None, use_errno=True)
    # With 64-bit offsets wherever the library has two of them.
    found: Any = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        found.restype = ctypes.c_int
    return found


_fallocate = _system_call()


def preallocate(fd: int, size: int) -> None:
    """Reserve ``size`` bytes, so that a full disk shows now; a no-op where that is impossible.

    Not ``os.posix_fallocate``: where the file system cannot do it (NFS before 4.2, some Lustre) the
    C library imitates that by writing a byte into each block, so every page is written twice.
    """
    if size == 0:
        return
    try:
        fallocate(fd, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def fallocate(fd: int, size: int) -> None:
    """Reserve the first ``size`` bytes by fallocate(2), or raise."""
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(fd, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def written_bytes(path: str) -> int:
    """Return how much of a file has been written; of one with space reserved less than its size.

    All of it where the file system does not tell.
    """
    found = end = 0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            except OSError as error:
                return found if error.errno == errno.ENXIO else size  # nothing follows
            found += end - start
    return found


def sync_directory(directory: str) -> None:
    """Make the entries of ``directory`` durable; a no-op where directories cannot be flushed."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


@contextmanager
def locked_directory(directory: str) -> Generator[None]:
    """Keep other processes that ask for it out of ``directory`` during the block.

    Where directories cannot be locked (NFS, some parallel file systems) it keeps nobody out. The
    system takes the lock from a process that dies. TimeoutError after ``_LOCK_SECONDS``.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another process has held the lock of {directory} for long"
                    raise TimeoutError(errno.ETIMEDOUT, message) from None
                time.sleep(0.01)  # who holds it compares and renames one small file
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield
    finally:
        with suppress(OSError):
            # If it is only closed, a process that was forked meanwhile has the lock as well.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def make_directories(directory: str) -> None:
    """Make ``directory`` (absolute) and what is missing above it, each durable in its parent.

    FileNotFoundError where somebody takes away meanwhile what was there.
    """
    missing: list[str] = []
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:
            there = os.lstat(path)
            if not stat.S_ISDIR(there.st_mode) and not os.path.isdir(path):
                message = f"{path} is needed as a directory but is something else"
                raise NotADirectoryError(errno.ENOTDIR, message) from None
        sync_directory(os.path.dirname(path))


def link_new(temporary: str, target: str) -> None:
    """Give the file ``temporary`` the name ``target``, which must be free, in one atomic step.

    ``FileExistsError`` if it is not. On file systems without hard links see ``_rename_new``.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        # NFS may have lost the reply to a link that was made and then tried again.
        if not os.path.samestat(os.stat(temporary), os.lstat(target)):
            raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _rename_new(temporary, target)
        return
    with suppress(OSError):  # the object stands; what is left is a hidden second name
        os.unlink(temporary)


def _rename_new(temporary: str, target: str) -> None:
    """``link_new`` by rename, which would replace: writers first lock the name.

    The lock is a hidden file made with ``O_EXCL``. Readers never see anything unfinished; a writer
    that is killed within this function leaves its lock, and the error of the next one names it.
    """
    directory, base = os.path.split(target)
    lock = os.path.join(directory, lock_name(base))
    try:
        fd = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        message = f"another writer is at it; if none is alive, remove {lock}"
        raise FileExistsError(errno.EEXIST, message) from None
    try:
        os.close(fd)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "the name is taken")
        os.rename(temporary, target)
    finally:
        os.unlink(lock)
