"""The benchmark of random numbers runs and reports every draw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tools.bench.random_numbers import BAR, DISTRIBUTIONS, Drawn, markdown

ROOT = Path(__file__).parents[2]


def test_the_command_measures_every_draw(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "tools.bench.random_numbers", "--rounds", "1"]
    command += ["--counts", "500", "--batch-seconds", "0.0001", "--json", str(results)]
    command += ["--markdown", str(tmp_path / "table.md")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(results.read_text())
    assert (tmp_path / "table.md").read_text() == ran.stdout
    names = [row["name"] for row in found["rows"]]
    assert names == [d.name for d in DISTRIBUTIONS] + ["rand", "randn", "randperm"]
    assert all(name in ran.stdout for name in names)
    assert all(row["ours"][0] > 0 < row["torch"][0] for row in found["rows"])
    assert found["machine"]["threads"] >= 1


def test_a_draw_that_misses_its_bar_says_so() -> None:
    rows = [
        Drawn(name="fast", count=10, ours=[BAR, 9.0, BAR], torch=[1.0, 1.0, 1.0]),
        Drawn(name="slow", count=10, ours=[BAR + 0.1], torch=[1.0]),
    ]
    rows.append(Drawn(name="fast", count=1000, ours=[2e-6], torch=[1e-6]))
    assert markdown(rows).splitlines() == [
        "| draw | 10 | 1,000 |",
        "| --- | ---: | ---: |",
        "| fast | 300000000.00 / 100000000.00 = 3.00 | 2.00 / 1.00 = 2.00 |",
        "| slow | 310000000.00 / 100000000.00 = 3.10 MISS |  |",
    ]
