from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp

from .conftest import Run, document


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of a state, the second of which has drifted."""
    w = torch.linspace(-1, 1, 500)
    dcp.save({"w": w, "b": torch.ones(3), "n": torch.zeros(2), "step": 1}, tmp_path / "a")
    n = torch.tensor([0.0, float("nan")])
    dcp.save({"w": w * 1.25, "b": torch.ones(3) + 9, "n": n, "step": 2}, tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def test_differences_are_shown_by_drift(run: Run, two: tuple[Path, Path]) -> None:
    result = run("diff", *two)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "~ step: 1 -> 2"
    assert [line.split()[0] for line in lines[2:5]] == ["b", "w", "n"]
    assert lines[3].startswith("w 0.25 0.25 1.000000 ")
    assert lines[4].endswith("NaN 0 -> 1")
    assert lines[5] == "3 tensors compared, 0 by equal checksums; 3 differ"
    names = [
        each["name"] for each in document(run("diff", *two, "--sort", "name", "--json"))["tensors"]
    ]
    assert names == ["b", "n", "w"]
    narrow = run("diff", *two, env={"COLUMNS": "40"}).stdout
    assert "\nw\n  drift 0.25 max 0.25" in narrow


def test_what_is_tolerated_is_no_difference(run: Run, two: tuple[Path, Path]) -> None:
    w = ("diff", *two, "--select", "w", "--no-values")
    assert run(*w).exit_code == 1
    assert run(*w, "--tolerance", "0.3").exit_code == 0
    assert run(*w, "--tolerance", "0.2").exit_code == 1
    assert run(*w, "--rtol", "0.26").exit_code == 0
    assert run(*w, "--atol", "0.26").exit_code == 0
    assert run("diff", *two, "--select", "n", "--tolerance", "9").exit_code == 1
    assert run("diff", *two, "--select", "step").exit_code == 1
    for option in ("--rtol", "--atol", "--tolerance"):
        for value in ("nan", "inf", "-1"):
            assert run("diff", *two, option, value).exit_code == 2


def test_the_same_is_told_by_checksums(run: Run, two: tuple[Path, Path], tmp_path: Path) -> None:
    result = run("diff", two[0], two[0])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "3 tensors compared, 3 by equal checksums; 0 differ" in result.stdout
    assert run("diff", two[0], two[0], "--quiet").stdout == ""
    again = tmp_path / "again"
    run("reshard", two[0], again, "--mesh", "dp=2", "--placements", "*=S(0)")
    assert run("diff", two[0], again).exit_code == 0
    result = run("diff", two[0], again, "--layout")
    assert result.exit_code == 1
    assert "~ w: " in result.stdout
    assert run("diff", two[0], tmp_path / "nothing").exit_code == 3
