"""From whatever a system call or a driver raised to the library's error tree."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager

from dtckpt.errors import CheckpointError, ObjectExists, ObjectNotFound, StorageError
from dtckpt.interrupts import raised_by_signal_handler


def storage_error(action: str, where: str, cause: Exception) -> StorageError:
    """The error that says ``cannot {action} {where}`` for ``cause``, ready to be raised from it.

    ``FileNotFoundError`` and ``FileExistsError`` become ``ObjectNotFound`` and ``ObjectExists``,
    all else ``StorageError``. An ``errno`` is kept.
    """
    kind, number = StorageError, None
    detail = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, OSError):
        number = cause.errno
        detail = cause.strerror or str(cause) or type(cause).__name__
        detail += _remedy(cause.errno, where)
    if isinstance(cause, FileNotFoundError):
        kind, number = ObjectNotFound, errno.ENOENT
    elif isinstance(cause, FileExistsError):
        kind, number = ObjectExists, errno.EEXIST
    message = f"cannot {action} {where}: {detail}"
    return kind(message) if number is None else kind(number, message)


def _remedy(number: int | None, where: str) -> str:
    """What can be done about an error of the system, and the facts that this needs."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        directory = os.path.dirname(where)
        while directory and not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        try:
            free = f"{shutil.disk_usage(directory).free} bytes are free there; "
        except OSError:
            free = ""
        return f" ({free}make room, or choose another place)"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return " (choose a place that this process may write to, or change its permissions)"
    return ""


@contextmanager
def translated(action: str, where: str) -> Generator[None]:
    """Turn every exception of the block but the library's own into ``storage_error``.

    Not one that a signal handler of the program raises.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        raise storage_error(action, where, error) from error


@contextmanager
def reading(action: str, where: str) -> Generator[None]:
    """``translated``, where an object is also missing if a directory is there or a file above."""
    with translated(action, where):
        try:
            yield
        except (IsADirectoryError, NotADirectoryError) as error:
            raise not_found(where) from error


@contextmanager
def failing(*, certain: bool) -> Generator[None]:
    """Say of every failure in the block whether it is certain that nothing comes of the write.

    Nothing does where nothing has been asked of the store so far, for one.
    """
    try:
        yield
    except CheckpointError as error:
        error.is_certain = certain
        raise


def not_found(where: str, why: str = "") -> ObjectNotFound:
    """The error for an object that is not there."""
    return ObjectNotFound(errno.ENOENT, f"no object at {where}{why}")


def already_exists(where: str) -> ObjectExists:
    """The error for a write under a name that is taken."""
    return ObjectExists(
        errno.EEXIST, f"an object is already at {where}: objects are never replaced by accident"
    )


def changed(where: str) -> ObjectExists:
    """The error for a replacement of an object that holds other bytes than expected by now."""
    return ObjectExists(
        errno.EEXIST,
        f"the object at {where} is not the one to be replaced: another writer was at it",
    )


def out_of_range(where: str, start: int, stop: int | None, size: int) -> StorageError:
    """The error for a read that goes past the end of an object of ``size`` bytes."""
    end = "end" if stop is None else stop
    return StorageError(f"cannot read bytes {start}:{end} of {where}: it has {size} bytes")
