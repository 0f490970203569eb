"""A file system in user space over a directory, which can less than a local disk.

As a network file system: no hard links, no reserving of space, nothing nameless, locks that only
this host sees. ``python -m tests.storage.local.linkless SOURCE TARGET`` serves it until it is
unmounted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import mfusepy


class Linkless(mfusepy.Operations):
    """Hands everything on to ``source`` but what it cannot do."""

    use_ns = True

    def __init__(self, source: str) -> None:
        self._source = source

    def _path(self, path: str) -> str:
        return self._source + path

    @mfusepy.overrides(mfusepy.Operations)
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._path(path)) if fh is None else os.fstat(fh)
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        told: dict[str, Any] = {name: getattr(found, name) for name in names}
        return told | {
            f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in ("a", "c", "m")
        }

    @mfusepy.overrides(mfusepy.Operations)
    def readdir(self, path: str, fh: int) -> Iterator[str]:
        yield from (".", "..", *os.listdir(self._path(path)))

    @mfusepy.overrides(mfusepy.Operations)
    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    @mfusepy.overrides(mfusepy.Operations)
    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags & ~os.O_DIRECT)

    @mfusepy.overrides(mfusepy.Operations)
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    @mfusepy.overrides(mfusepy.Operations)
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    @mfusepy.overrides(mfusepy.Operations)
    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._path(path), length)
        return 0

    @mfusepy.overrides(mfusepy.Operations)
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    @mfusepy.overrides(mfusepy.Operations)
    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    @mfusepy.overrides(mfusepy.Operations)
    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._path(path), mode)
        return 0

    @mfusepy.overrides(mfusepy.Operations)
    def rmdir(self, path: str) -> int:
        os.rmdir(self._path(path))
        return 0

    @mfusepy.overrides(mfusepy.Operations)
    def unlink(self, path: str) -> int:
        os.unlink(self._path(path))
        return 0

    @mfusepy.overrides(mfusepy.Operations)
    def rename(self, old: str, new: str) -> int:
        os.rename(self._path(old), self._path(new))
        return 0

    @mfusepy.overrides(mfusepy.Operations)
    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._path(path), mode)
        return 0


if __name__ == "__main__":
    # What is cached of a name would be of the file that had it before, and an open file would
    # first be renamed where another takes its name, which is then nobody's for a moment.
    mfusepy.FUSE(
        Linkless(sys.argv[1]),
        sys.argv[2],
        foreground=True,
        attr_timeout=0,
        entry_timeout=0,
        hard_remove=True,
    )
