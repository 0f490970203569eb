"""Disks of a few MiB, which are full soon; made where the tests may mount file systems."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

RDONLY, REMOUNT = 1, 32
_DETACH = 2


def mount(target: Path, flags: int, options: str) -> None:
    """Mount a file system in memory at ``target``, or skip the test where that is not allowed."""
    if sys.platform != "linux":
        pytest.skip("mounts a tmpfs, which only Linux has")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", flags, options.encode()):
        pytest.skip(f"may not mount a tmpfs: {os.strerror(ctypes.get_errno())}")


@contextmanager
def small_disk_at(target: Path) -> Generator[Path]:
    """Mount a disk of 8 MiB for the block."""
    mount(target, 0, "size=8m")
    try:
        yield target
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(target), _DETACH)
