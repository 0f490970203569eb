from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.runs.overview import look_over

from .conftest import Run, data_file, document, flip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of incremental checkpoints, one pinned, one half-written, one damaged."""
    large, small = torch.zeros(1 << 18), torch.zeros(8)
    for step in (1, 2, 3, 10):
        base = tmp_path / "run/step-1" if step > 1 else None
        state = {"large": large, "small": small + step}
        dcp.save(state, tmp_path / f"run/step-{step}", base=base)
    run = tmp_path / "run"
    (run / "step-2.pinned").touch()
    flip(run / "step-3" / "manifest.json", 40)
    (run / "step-20" / "data" / ("0" * 16)).mkdir(parents=True)
    (run / "step-20" / "data" / ("0" * 16) / "00000.safetensors").write_bytes(bytes(100))
    return run


def test_states_sizes_and_references(run: Run, root: Path) -> None:
    result = run("ls", root, "--json")
    assert result.exit_code == 1  # one is damaged
    steps = {step["name"]: step for step in document(result)["steps"]}
    states = {name: step["state"] for name, step in steps.items()}
    assert states == {
        "step-1": "committed",
        "step-2": "committed",
        "step-3": "damaged",
        "step-10": "committed",
        "step-20": "incomplete",
    }
    assert steps["step-20"]["own_bytes"] == 100
    assert steps["step-2"]["is_pinned"]
    assert steps["step-2"]["bases"] == ["step-1"]
    assert steps["step-1"]["needed_by"] == ["step-2", "step-10"]
    assert steps["step-2"]["own_bytes"] < 1 << 20 < steps["step-1"]["own_bytes"]
    assert steps["step-2"]["borrowed_bytes"] == steps["step-1"]["own_bytes"]


def test_a_missing_file_is_damage(run: Run, saved: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    assert run("ls", root).exit_code == 0
    data_file(root / "step-20").unlink()
    result = run("ls", root)
    assert result.exit_code == 1
    assert "step-20: missing, or of another size: " in result.stdout


@pytest.mark.parametrize("columns", ["80", "200"])
def test_people_read_it(run: Run, root: Path, columns: str) -> None:
    text = run("ls", root, env={"COLUMNS": columns}).stdout
    assert text.startswith("3 committed checkpoints in ")
    assert "needed by step-2, step-10" in text
    assert "pinned, refers to step-1 (1.0 MiB)" in text
    table = text.partition("\n\n")[2].partition("\n\n")[0]
    assert max(map(len, table.splitlines())) <= int(columns)


def test_others_checkpoints_are_listed(run: Run, saved: Path, tmp_path: Path) -> None:
    dcp.export(saved / "step-20", tmp_path / "run" / "step-5", format="dcp")
    assert "torch.distributed.checkpoint" in run("ls", tmp_path / "run").stdout


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("run/step-1", "is a checkpoint itself (dtckpt), not a directory of them"),
        ("empty", "nor anything else: the directory is empty"),
        ("nowhere", "does not exist"),
        ("memory://ls/nothing", "no object has a name that begins so"),
    ],
)
def test_what_is_no_run_is_told(run: Run, tmp_path: Path, place: str, told: str) -> None:
    dcp.save({"a": torch.ones(2)}, tmp_path / "run/step-1")
    (tmp_path / "empty").mkdir()
    result = run("ls", place if "://" in place else tmp_path / place)
    assert result.exit_code == 3
    assert told in result.stderr


def test_any_name_that_ends_in_a_number(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(2)}
    for name in ("global_step12", "7", "notes"):
        dcp.save(state, tmp_path / name)
    assert [(step.number, step.name) for step in look_over(tmp_path)] == [
        (7, "7"),
        (12, "global_step12"),
    ]


def test_a_directory_of_runs_is_none(run: Run, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, tmp_path / "run-1" / "step-1")
    (tmp_path / "run-2").mkdir()  # as a deletion leaves it
    assert look_over(tmp_path) == ()
    result = run("ls", tmp_path)
    assert result.exit_code == 3
    assert "run-1" in result.stderr
