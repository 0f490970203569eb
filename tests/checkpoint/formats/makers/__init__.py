"""Programs that make the checkpoints of other programs in ``tests/data`` anew, with these."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_DATA = Path(__file__).parents[3] / "data"


@contextmanager
def making(name: str) -> Generator[str]:
    """Give an empty directory, which becomes an archive of this name."""
    with tempfile.TemporaryDirectory() as place:
        yield place
        shutil.make_archive(str(_DATA / name), "xztar", place)


def unpacked(name: str, place: Path) -> Path:
    """Return a directory with what is in the archive of a name."""
    shutil.unpack_archive(_DATA / f"{name}.tar.xz", place, filter="data")
    return place
