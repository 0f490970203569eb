"""Memory for bytes on their way to a store: aligned, in huge pages, used again and again."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Self, final

ARENA_UNIT = 2 << 20
"""Arenas begin at a multiple of this and are a multiple of it long: a huge page, in bytes."""


@final
class Arena:
    """``size`` bytes of private memory, which direct I/O takes as it is.

    The system gives pages when they are first touched, in huge ones where it can: far fewer to
    fill, to pin and to map than small ones. So keep an arena from save to save; a larger one
    replaces it. All its bytes are zero at first.

    A context manager. Any thread may use it; who writes where is for its users to settle.
    """

    def __init__(self, size: int) -> None:
        """``size`` in bytes is rounded up to a multiple of 2 MiB, and to one at least.

        ``ValueError`` if it is negative, ``OSError`` where the system has no room.
        """
        if size < 0:
            raise ValueError(f"bad arena size {size}: expected 0 or more bytes")
        self._size = max(-(-size // ARENA_UNIT), 1) * ARENA_UNIT
        # One unit more than needed, to begin where a huge page can: untouched it costs nothing.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, self._size + ARENA_UNIT, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        base = address_of(memoryview(memory))
        skip = -base % ARENA_UNIT
        self._address = base + skip
        self._view: memoryview | None = memoryview(memory)[skip : skip + self._size]

    @property
    def view(self) -> memoryview:
        """All of it: flat, writable bytes. ``ValueError`` once the arena is closed."""
        if self._view is None:
            raise ValueError("the arena is closed")
        return self._view

    @property
    def address(self) -> int:
        """Where ``view`` begins in memory; ``ValueError`` once the arena is closed."""
        if self._view is None:
            raise ValueError("the arena is closed")
        return self._address

    @property
    def size(self) -> int:
        """Length of ``view`` in bytes."""
        return self._size

    def close(self) -> None:
        """Give the memory back; closing again does nothing.

        Views that others still hold (slices, NumPy arrays, torch tensors) stay valid: the memory
        then goes when the last of them does.
        """
        # Unmapping by force is refused while there are views; the last reference unmaps anyway.
        self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def address_of(view: memoryview) -> int:
    """Where the bytes of ``view`` begin in memory; it must be writable and contiguous."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _system_call() -> Callable[[int, int, int], int] | None:
    """Return madvise(2), where the system has it, and huge pages."""
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found.restype = ctypes.c_int
    return found


_madvise = _system_call()


def prefer_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages for memory that nobody has written to yet; refusal does no harm.

    Pages that it shares with others count for it, so that neighbours join.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = -(-(address + size - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    if _madvise is not None:
        _madvise(start, length, mmap.MADV_HUGEPAGE)
