"""Memory that processes share without a name: it goes with the last one that holds it.

A file in memory (``memfd_create``) needs no room in ``/dev/shm``, which is small in containers, and
nothing of it is left when a process is killed. Once an object is complete it is sealed: no process
can change it any more, whatever descriptors it has kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from dtckpt.errors import StorageError

_F_SEAL_FUTURE_WRITE = 0x0010
"""Python has no name for it. F_SEAL_WRITE would wait for the network to have sent every page."""
_SPARE_FRACTION = 0.05
"""Of the host's memory this much is never taken, lest the system kill somebody."""
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
_STAT = "memory.stat"
_CACHED = ("inactive_file", "active_file")


class Memory:
    """``size`` bytes that can be handed to other processes; OSError where there is no room."""

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise StorageError("agents keep objects in files in memory, which only Linux has")
        self.size = size
        self.fd = os.memfd_create("dtckpt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        # Now, and not while it is written: a process that finds no page then is killed.
        if size:
            os.posix_fallocate(self.fd, 0, size)

    def seal(self, size: int) -> None:
        """Keep the first ``size`` bytes only; ValueError if there are not so many.

        From now on nobody can change them, where the system has that (Linux 5.1).
        """
        if not 0 <= size <= os.fstat(self.fd).st_size:
            raise ValueError(f"{size} bytes of {self.size} that were reserved")
        os.ftruncate(self.fd, size)
        self.size = size
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    def reading_fd(self) -> int:
        """Return a descriptor of its own that can only be read, for somebody else to close."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)


def total_bytes() -> int:
    """Return the memory of the host, or what the container may have of it."""
    limits = [limit for limit, _ in _cgroup()]
    return min([_meminfo("MemTotal"), *limits])


def free_bytes() -> int:
    """Return what can be taken without endangering others."""
    found = [_meminfo("MemAvailable"), *(limit - used for limit, used in _cgroup())]
    return max(min(found) - int(_SPARE_FRACTION * total_bytes()), 0)


def _meminfo(key: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) << 10
    raise OSError(errno.ENOENT, f"{_MEMINFO} does not tell {key}")


def _cgroup() -> list[tuple[int, int]]:
    """Return limit and use of this container, if it has a limit."""
    found: list[tuple[int, int]] = []
    for limit, used in _CGROUPS:
        with suppress(OSError, ValueError):  # "max", or another kind of control groups
            most, taken = int(Path(limit).read_text()), int(Path(used).read_text())
            found.append((most, max(taken - _cached_bytes(Path(used).with_name(_STAT)), 0)))
    return found


def _cached_bytes(stat: Path) -> int:
    """Return what a container uses for pages of files, which the system gives up for others.

    A job that reads data and writes checkpoints fills all that its limit leaves with them.
    """
    try:
        told = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    # Those with "total_" count the control groups below, as the use does.
    return sum(int(told.get(f"total_{name}", told.get(name, 0))) for name in _CACHED)
