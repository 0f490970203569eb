"""The benchmark of operator calls measures every row; how fast they are is not tested."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.python import run_python
from tools.bench.dispatch.beside import PYTHON, CheckoutFailed, checkout
from tools.bench.dispatch.rows import COLD_ROWS, WARM_ROWS
from tools.bench.frame.timing import Comparison

ROOT = Path(__file__).parents[3]


def test_every_row_is_measured_on_every_side(tmp_path: Path) -> None:
    """It makes the job of its process a fake one, so it gets a process of its own."""
    found, table = tmp_path / "all.json", tmp_path / "all.md"
    command = ["-m", "tools.bench.dispatch", "--rounds", "1"]
    command += ["--cold-rounds", "1", "--cold-axes", "1", "--batch-seconds", "0"]
    files = ["--json", str(found), "--markdown", str(table)]
    run = run_python(*command, *files)
    assert run.returncode == 0, run.stderr
    rows = json.loads(found.read_text())["rows"]
    cold = [(row.name, 1) for row in COLD_ROWS if row.axes == 1]
    assert [(r["name"], r["axes"]) for r in rows] == [
        (row.name, row.axes) for row in WARM_ROWS
    ] + cold
    for row in rows:
        assert not row["failed"], (row["name"], row["failed"])
        assert {side: len(times) for side, times in row["times"].items()} == {
            "plain": 1,
            "torch": 1,
            "dtckpt": 1,
        }
        assert row["ratio"] > 0
        assert row["name"] in table.read_text()


def test_ratios_are_those_of_single_rounds() -> None:
    times = {"torch": [1.0, 10.0, 2.0], "dtckpt": [0.5, 9.0, 0.2]}
    row = Comparison(name="add", bar=0.5, times=times)
    assert row.ratio == 0.5
    assert row.is_met
    assert Comparison(name="add", bar=0.5).is_met is None


def test_two_checkouts_are_measured_in_turn(tmp_path: Path) -> None:
    """Here, this one beside itself."""
    found, table = tmp_path / "all.json", tmp_path / "all.md"
    command = ["-m", "tools.bench.dispatch", "--beside", str(ROOT), "--only=mul"]
    command += ["--rounds=3", "--cold-rounds=2", "--cold-axes=1", "--batch-seconds=0"]
    files = ["--json", str(found), "--markdown", str(table)]
    run = run_python(*command, *files)
    assert run.returncode == 0, run.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [row["here"]["name"] for row in rows] == ["mul", "mul"]
    for row, rounds in zip(rows, (3, 2), strict=True):
        for side in ("here", "beside"):
            assert not row[side]["failed"]
            assert {len(times) for times in row[side]["times"].values()} == {rounds}
    assert "| mul, cold, 1 axes |" in table.read_text()


def test_a_checkout_without_its_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckoutFailed, match="make install"), checkout(tmp_path):
        pass
    (tmp_path / PYTHON).parent.mkdir(parents=True)
    (tmp_path / PYTHON).symlink_to(sys.executable)
    with pytest.raises(CheckoutFailed), checkout(tmp_path):
        pass
