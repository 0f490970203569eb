"""The benchmark of random numbers runs and reports every draw."""

from __future__ import annotations

import json
from pathlib import Path

from tests.python import run_python
from tools.bench.random_numbers import BAR, DISTRIBUTIONS, Drawn, grid


def test_the_command_measures_every_draw(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = ["-m", "tools.bench.random_numbers", "--rounds", "1"]
    command += ["--counts", "500", "--batch-seconds", "0.0001", "--json", str(results)]
    command += ["--markdown", str(tmp_path / "table.md")]
    ran = run_python(*command)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(results.read_text())
    names = [row["name"] for row in found["rows"]]
    assert names == [d.name for d in DISTRIBUTIONS] + ["rand", "randn", "randperm"]
    assert all(name in ran.stdout for name in names)
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("Machine: ")
    assert all(f"| {name} | " in table for name in names)
    assert all(row["times"]["dtckpt"][0] > 0 < row["times"]["torch"][0] for row in found["rows"])
    assert found["machine"]["threads"] >= 1


def drawn(name: str, count: int, ours: list[float], torch: list[float]) -> Drawn:
    return Drawn(name=name, count=count, bar=BAR, times={"dtckpt": ours, "torch": torch})


def test_a_draw_that_misses_its_bar_says_so() -> None:
    rows = [
        drawn("fast", 10, [BAR, 9.0, BAR], [1.0, 1.0, 1.0]),
        drawn("slow", 10, [BAR + 0.1], [1.0]),
        drawn("fast", 1000, [2e-6], [1e-6]),
    ]
    assert grid(rows).rows == (
        ("fast", "300000000.00 / 100000000.00 = 3.00", "2.00 / 1.00 = 2.00"),
        ("slow", "310000000.00 / 100000000.00 = 3.10 MISS", ""),
    )
