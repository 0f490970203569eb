"""Stores and checkpoints on every server that can be had. Run by ``make test-servers``."""

from __future__ import annotations

import sys
from pathlib import Path

from ..environments import run_each, run_tests
from .every import SERVERS, Kind
from .server import Missing

TESTS = ("test_stores.py", "test_checkpoints.py", "test_faults.py")


def run(kind: Kind, seconds: float) -> str:
    """Run the tests on a server and return what came of it, or why not."""
    try:
        kind.prepare()
    except Missing as error:
        return f"skipped: {error}"
    tests = [f"tests/servers/{name}" for name in TESTS]
    return run_tests(Path(sys.executable), tests, seconds, DTCKPT_SERVERS=kind.name)


if __name__ == "__main__":
    sys.exit(run_each(SERVERS, run, str(__doc__), seconds=300))
