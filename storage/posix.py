"""The system calls behind the local store, each complete: no short reads, no short writes.

They raise plain ``OSError``. Interrupted calls (EINTR) are repeated by Python itself.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

__all__ = [
    "link_new",
    "make_directories",
    "preallocate",
    "read_at",
    "sync_directory",
    "write_at",
]

_IOV_MAX = 1024
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
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


def preallocate(fd: int, size: int) -> None:
    """Reserve ``size`` bytes, so that a full disk shows now; a no-op where that is impossible.

    Where the file system cannot, the C library imitates it by touching every block.
    """
    if size == 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


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


def make_directories(directory: str) -> None:
    """Make ``directory`` (absolute) and what is missing above it, each durable in its parent."""
    missing: list[str] = []
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
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
    """``link_new`` by rename, which would replace: writers first claim the name exclusively.

    The claim is a hidden file made with ``O_EXCL``. Readers never see anything unfinished; a writer
    that is killed within this function leaves its claim, and the error of the next one names it.
    """
    directory, base = os.path.split(target)
    claim = os.path.join(directory, f".{base}.claim")
    try:
        fd = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        message = f"another writer is at it; if none is alive, remove {claim}"
        raise FileExistsError(errno.EEXIST, message) from None
    try:
        os.close(fd)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "the name is taken")
        os.rename(temporary, target)
    finally:
        os.unlink(claim)
