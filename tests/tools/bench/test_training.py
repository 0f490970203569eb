"""The benchmark of training steps trains the same model on both sides; its times are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.python import run_python
from tools.bench.training.__main__ import elastic_grid, sequence_grid
from tools.bench.training.elastic import Elastic
from tools.bench.training.ways import Way


def test_both_sides_train_alike(tmp_path: Path) -> None:
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    command = ["-m", "tools.bench.training", "--rounds", "1", "--only", "x TP"]
    command += ["--json", str(out), "--markdown", str(table)]
    done = run_python(*command, timeout=240)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"] == "FSDP x TP"
    assert row["losses"]["dtckpt"] == pytest.approx(row["losses"]["torch"], rel=1e-3)
    assert set(row["times"]) == set(row["memory"]) == {"torch", "dtckpt"}
    assert 0 < row["collectives"]["dtckpt"] <= row["collectives"]["torch"]
    assert "| FSDP x TP |" in table.read_text()


def test_ways_are_shown_beside_the_first() -> None:
    ways = [
        Way(name=name, times=times, collectives=3, received=1 << 20, memory=1 << 21)
        for name, times in {"one": [1.0, 2.0, 9.0], "other": [4.0, 3.0, 8.0]}.items()
    ]
    by_median = elastic_grid(Elastic(ways=ways, is_same=True), 8)
    assert by_median.rows[1] == ("other", "4000", "2.00", "3", "1.0 MiB", "2.0 MiB")
    assert "ranks ARE NOT those" in elastic_grid(Elastic(ways=ways, is_same=False), 8).facts
    assert sequence_grid(ways).rows[1] == ("other", "3000", "3.00", "1.0 MiB", "2.0 MiB")
