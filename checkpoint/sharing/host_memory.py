"""Memory that the ranks of one host share: slots in turn for each, and how far each has come.

A file in memory (``memfd_create``): it has no name, so nothing of it is left whoever is killed, and
it needs no room in ``/dev/shm``, which is small in containers. Others open it by way of the process
that has made it, and compare a token: in a container its number may mean another process.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from ..ranks.failing import CalledOff

NUM_SLOTS = 2
"""Of each rank: one is filled while the others copy out of the one before."""

_NAME = "dtckpt-load"
_TOKEN_BYTES = 16
_LINE_BYTES = 64
"""What ranks write apart from each other lies in lines of its own of their caches."""
_SPINS = 50
_LEAST_SECONDS, _MOST_SECONDS = 50e-6, 1e-3
_LOOK_SECONDS = 0.05


class HostMemory:
    """Slots of ``slot_bytes`` for some ranks, which go by their position among them."""

    def __init__(self, fd: int, num_ranks: int, slot_bytes: int) -> None:
        """Map an open file, which belongs to this object from now on."""
        self.num_ranks = num_ranks
        self.slot_bytes = slot_bytes
        self._header_bytes = _up(_LINE_BYTES * (2 + 2 * num_ranks), mmap.PAGESIZE)
        self._map = mmap.mmap(fd, self._header_bytes + num_ranks * self._ring_bytes)
        words = np.frombuffer(self._map, np.int64, self._header_bytes // 8)[:: _LINE_BYTES // 8]
        self._called_off = words[1:2]
        self._filled = words[2 : 2 + num_ranks]
        self._taken = words[2 + num_ranks : 2 + 2 * num_ranks]
        self._fd = fd
        self._fence = threading.Lock()
        self._fence.acquire()

    @property
    def _ring_bytes(self) -> int:
        return NUM_SLOTS * _up(self.slot_bytes, mmap.PAGESIZE)

    @classmethod
    def make(cls, num_ranks: int, slot_bytes: int) -> HostMemory | None:
        """Return new memory, of which only the head has room yet; None where there can be none."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            header_bytes = _up(_LINE_BYTES * (2 + 2 * num_ranks), mmap.PAGESIZE)
            size = header_bytes + num_ranks * NUM_SLOTS * _up(slot_bytes, mmap.PAGESIZE)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.posix_fallocate(fd, 0, header_bytes)
            os.pwrite(fd, secrets.token_bytes(_TOKEN_BYTES), 0)
            return cls(fd, num_ranks, slot_bytes)
        except OSError:
            os.close(fd)
            return None

    @property
    def place(self) -> str:
        """What ``open`` on the same host is to be told, as long as this object lives."""
        token = self._map[:_TOKEN_BYTES].hex()
        return json.dumps([os.getpid(), self._fd, token, self.num_ranks, self.slot_bytes])

    @classmethod
    def open(cls, place: str) -> HostMemory | None:
        """Return the memory at a place; None where this process cannot reach it."""
        pid, number, token, num_ranks, slot_bytes = json.loads(place)
        path = f"/proc/{pid}/fd/{number}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = cls(fd, num_ranks, slot_bytes)
        except (OSError, ValueError):  # another file, and a smaller one
            os.close(fd)
            return None
        return found if found._map[:_TOKEN_BYTES].hex() == token else None

    def take_room(self, position: int, num_bytes: Sequence[int]) -> bool:
        """Have the system give memory for what a rank puts into its slots by turns; whether it did.

        Now, since a process that finds no page when it writes is killed.
        """
        try:
            for slot in range(NUM_SLOTS):
                most = max(num_bytes[slot::NUM_SLOTS], default=0)
                if most:
                    os.posix_fallocate(self._fd, self._start(position, slot), most)
        except OSError:
            return False
        return True

    def _start(self, position: int, number: int) -> int:
        step = self._ring_bytes // NUM_SLOTS
        return self._header_bytes + position * self._ring_bytes + number % NUM_SLOTS * step

    def slot(self, position: int, number: int) -> memoryview:
        """Return the slot of a rank in a round."""
        start = self._start(position, number)
        return memoryview(self._map)[start : start + self.slot_bytes]

    def is_free(self, number: int) -> bool:
        """Whether all ranks are done with what was in the slots of a round before."""
        is_free = min(self._taken.tolist()) > number - NUM_SLOTS
        self._order()
        return is_free

    def is_filled(self, position: int, number: int) -> bool:
        """Whether a rank has filled its slot of a round."""
        is_filled = self._filled.item(position) > number
        self._order()
        return is_filled

    def note_filled(self, position: int, number: int) -> None:
        """Let the others have what a rank has put into its slot of a round."""
        self._order()
        self._filled[position] = number + 1

    def note_taken(self, position: int, number: int) -> None:
        """Note that a rank needs the slots of a round no longer."""
        self._order()
        self._taken[position] = number + 1

    def call_off(self) -> None:
        """Let all that wait leave: this rank cannot go on."""
        self._called_off[0] = 1

    def wait(self, until: Callable[[], bool], is_broken: Callable[[], bool]) -> None:
        """Wait until something is so; CalledOff where it will not be.

        ``is_broken`` is asked now and then whether another rank is lost or has failed elsewhere.
        """
        spins, pause = 0, _LEAST_SECONDS
        look_at = time.monotonic() + _LOOK_SECONDS
        while not until():
            if self._called_off[0]:
                raise CalledOff
            if spins < _SPINS:
                spins += 1
                os.sched_yield()
                continue
            time.sleep(pause)
            pause = min(2 * pause, _MOST_SECONDS)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_SECONDS
                if is_broken():
                    self.call_off()
                    raise CalledOff

    def _order(self) -> None:
        """Keep all reads and writes before this before all that follow.

        A lock that is released and taken does that on every processor; most need nothing of it.
        """
        self._fence.release()
        self._fence.acquire()

    def close(self) -> None:
        """Give it back; what others still look at stays for as long as they do."""
        self._called_off = self._filled = self._taken = np.empty(0, np.int64)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        with suppress(BufferError):
            self._map.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
