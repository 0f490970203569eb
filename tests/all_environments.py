"""Every environment that tests know, one after the other. Run by ``make all-environments``.

CI tests some of them with each commit. This runs all, without stopping at a failure, and writes the
record that is committed: what was tested, when, of which commit, with which result.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from .environments import ROOT, run_tests

SECTIONS: tuple[tuple[str, str, tuple[str, ...], dict[str, str]], ...] = (
    (
        "All tests on other torches",
        "tests.matrix",
        ("python3.11-torch2.14.1", "python3.11-torch2.15.0", "--seconds", "7200"),
        {"DTCKPT_MATRIX_TESTS": "whole"},
    ),
    ("The quick part of them on each Python and torch", "tests.matrix", (), {}),
    ("Frameworks", "tests.adapters", (), {}),
    ("Object stores", "tests.servers", (), {}),
)
"""Titles of the record, and the modules that test an environment after the other: their arguments
and variables."""

FAULTS = tuple(f"tests/servers/test_{name}.py" for name in ("faults", "skew", "outages"))

_HEAD = """# Environments

The last whole run of `make all-environments`: commit {commit}, {date}, Python {python}.
CI tests some of these with each commit.
"""


def main() -> int:
    """Test all environments and write the record; return 1 if some failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--write", type=Path, required=True, help="the record, a page of Markdown")
    options = parser.parse_args()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = [
        _HEAD.format(
            commit=commit.strip(),
            date=datetime.now(UTC).date(),
            python=".".join(map(str, sys.version_info[:3])),
        )
    ]
    for title, module, arguments, variables in SECTIONS:
        lines += [f"## {title}", "", *_table(_results(module, arguments, variables)), ""]
    lines += ["## Faults of object stores", "", *_table([_faults()]), ""]
    options.write.write_text("\n".join(lines).rstrip() + "\n")
    return 1 if any("FAILED" in line for line in lines) else 0


def _results(module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Run a module over its environments; return ``name: result`` for each."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        command = [sys.executable, "-m", module, "--record", str(record), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False)
        if record.exists():
            return record.read_text().splitlines()
        return [f"{module}: FAILED: ended with {done.returncode} before it had results"]


def _faults() -> str:
    start = time.monotonic()
    result = run_tests(
        Path(sys.executable),
        ["-n", "2", *FAULTS, "tests/servers/test_checkpoints.py"],
        3600,
        DTCKPT_FAULTS="whole",
        DTCKPT_SERVERS="fake-s3,fake-gcs",
    )
    return f"each fault at each kind of request: {result} ({time.monotonic() - start:.0f} s)"


def _table(results: list[str]) -> list[str]:
    rows = [result.partition(": ") for result in results]
    return ["| environment | result |", "|---|---|", *[f"| {a} | {b} |" for a, _, b in rows]]


if __name__ == "__main__":
    sys.exit(main())
