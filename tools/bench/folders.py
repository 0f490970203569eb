"""Directories of checkpoints: made fresh, removed for good, read into the page cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .frame.team import Team

_READ_BYTES = 16 << 20


def fresh(team: Team, path: Path) -> None:
    """Remove what is there, and let the file system finish with it before anybody is timed."""
    if team.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    team.barrier()


def warm(team: Team, path: Path) -> None:
    """Read every file below once, the ranks taking turns, so that all lie in the page cache."""
    buffer = bytearray(_READ_BYTES)
    for number, file in enumerate(_files(path)):
        if number % team.size == team.rank:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
    team.barrier()


def sync_files(path: Path) -> None:
    """Make a file durable, and its name in its directory."""
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.rglob("*")) if file.is_file())
