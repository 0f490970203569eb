"""The benchmark of training steps trains the same model on both sides; its times are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_both_sides_train_alike(tmp_path: Path) -> None:
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    command = [sys.executable, "-m", "tools.bench.training", "--rounds", "1", "--only", "x TP"]
    command += ["--json", str(out), "--markdown", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"] == "FSDP x TP"
    assert row["losses"]["dtckpt"] == pytest.approx(row["losses"]["torch"], rel=1e-3)
    assert set(row["times"]) == set(row["memory"]) == {"torch", "dtckpt"}
    assert 0 < row["collectives"]["dtckpt"] <= row["collectives"]["torch"]
    assert "| FSDP x TP |" in table.read_text()
