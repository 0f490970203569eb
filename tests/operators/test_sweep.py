"""Every operator of torch's database, with a few placements each, on four ranks.

An operator is tried here as soon as torch knows samples of it; ``make operators`` tries all
placements of many samples.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..python import run_python

MOST_NOT_RIGHT = 16
"""Operators of some 650 that may be refused, alike on all ranks; docs/operators.md names them."""


def test_no_operator_is_wrong_or_parts_the_ranks(tmp_path: Path) -> None:
    lines = tmp_path / "results.jsonl"
    command = ("-m", "tests.operators", "--json", lines)
    options = ("--sizes=uneven", "--mesh=4", "--samples=1", "--choices=2", "--jobs=2")
    run = run_python(*command, *options, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=540)
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    wanting = [
        each["name"]
        for each in results
        if any(count for kind, count in each["counts"].items() if kind != "right")
    ]
    assert run.returncode == 0, (run.stdout[-3000:], run.stderr[-3000:])
    assert len(results) > 600
    assert len(wanting) <= MOST_NOT_RIGHT, wanting
