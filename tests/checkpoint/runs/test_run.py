"""The directory of a run: what in it is the run's own, and what of it is told."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dtckpt.checkpoint import CheckpointManager, Keep
from dtckpt.checkpoint.runs.run import Run
from dtckpt.checkpoint.runs.upkeep import Upkeep
from dtckpt.storage import LocalStore, MemoryStore


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((64,), float(step)), "step": step}


def save(root: Path, *steps: int) -> None:
    with CheckpointManager(root) as manager:
        manager.restore_if_any(state(0))
        for step in steps:
            manager.save(step, state(step), metrics={"loss": step})


def test_what_others_have_called_like_records_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    record = (tmp_path / "step-1.json").read_bytes()
    other = {
        "step-77.json": b"notes on what became of it",
        "step-007.json": record,  # no run calls a step so
        "step-0000100.pinned": b"",
        "step-0000100.abandoned": b"",
    }
    for name, data in {**other, "step-5.json": record, "step-6.abandoned": b""}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "step-0000100").mkdir()
    run = Run(LocalStore(tmp_path))
    Upkeep(run=run, keep=Keep(), leftovers_after=timedelta(0)).collect()
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-1", "step-1.json", "step-0000100", *other,
    }  # fmt: skip


def test_a_prefix_is_of_one_directory() -> None:
    for prefix in ("runs/step-", "/", "a\\"):
        with pytest.raises(ValueError, match="bad"):
            CheckpointManager(MemoryStore(), prefix=prefix)
