"""A run begins only where nothing looks like a checkpoint; elsewhere an error names what does."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import CheckpointManager
from dtckpt.errors import AlreadyCommitted, NotCommitted, StorageError
from dtckpt.storage import MemoryStore


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((4,), float(step)), "step": step}


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("step-0010", "step-00"),
        ("step_10", "step_"),
        ("checkpoint-10", "checkpoint-"),
        ("epoch=3-step=10", "epoch=3-step="),
        ("10", ""),
        ("Step-10", "Step-"),
        ("step10", "step"),
        ("iter_0000010", "iter_00000"),
        ("step-9.10", "step-9."),
    ],
)
def test_another_name_is_an_error_that_names_the_prefix(
    tmp_path: Path, name: str, prefix: str
) -> None:
    ckpt.save(state(10), tmp_path / name)
    ckpt.save(state(2), tmp_path / f"{prefix}2")
    with CheckpointManager(tmp_path, prefix="ours-") as manager:
        told = re.escape(f"prefix={prefix!r} takes {name}.")
        for look in (manager.restore_if_any, manager.restore):
            with pytest.raises(NotCommitted, match=told):
                look(state(0))
        with pytest.raises(NotCommitted, match=told):
            manager.latest()
        with pytest.raises(NotCommitted, match=told):
            manager.restore(state(0), step=10)
    got = state(0)
    with CheckpointManager(tmp_path, prefix=prefix) as manager:
        assert manager.restore_if_any(got) is not None
        assert manager.save(11, state(11))
    assert got["step"] == 10
    with CheckpointManager(tmp_path, prefix=prefix) as manager:
        assert manager.all_steps() == (2, 10, 11)


@pytest.mark.parametrize("name", ["best", "final", "step-10-ema"])
def test_a_name_without_a_number_is_an_error(tmp_path: Path, name: str) -> None:
    ckpt.save(state(10), tmp_path / name)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(NotCommitted, match=rf"holds {name}, .*load one by its path"),
    ):
        manager.restore_if_any(state(0))


def test_a_root_one_level_too_high_is_an_error(tmp_path: Path) -> None:
    ckpt.save(state(7), tmp_path / "a" / "run" / "step-7")
    for root in (tmp_path, tmp_path / "a"):
        with CheckpointManager(root) as manager:
            told = re.escape(f"give {tmp_path / 'a' / 'run'}.")
            with pytest.raises(NotCommitted, match=told):
                manager.restore_if_any(state(0))


def test_a_root_that_is_a_checkpoint_is_an_error_and_nothing_is_saved_in_it(tmp_path: Path) -> None:
    root = tmp_path / "step-5"
    ckpt.save(state(5), root)
    before = sorted(tmp_path.rglob("*"))
    with CheckpointManager(root) as manager:
        with pytest.raises(NotCommitted, match=r"step-5 is a checkpoint itself.*directory above"):
            manager.restore_if_any(state(0))
        with pytest.raises(AlreadyCommitted, match="step-5 is a checkpoint itself"):
            manager.save(6, state(6))
    assert sorted(tmp_path.rglob("*")) == before


# torch warns of its own planner.
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_other_programs_are_an_error(tmp_path: Path) -> None:
    torch_dcp: Any = torch.distributed.checkpoint
    torch_dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp" / "step-5", no_dist=True)
    torch_dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "one", no_dist=True)
    (tmp_path / "hf" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "hf" / "checkpoint-5" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "pt").mkdir()
    torch.save({"w": torch.ones(4)}, tmp_path / "pt" / "step-5.pt")
    for folder, told in {
        "dcp": r"torch\.distributed\.checkpoint \(step-5/",
        "one": r"torch\.distributed\.checkpoint \(\.metadata|\(__0_0",
        "hf": r"weights .*checkpoint-5/model\.safetensors",
        "pt": r"weights .*step-5\.pt",
    }.items():
        with (
            CheckpointManager(tmp_path / folder) as manager,
            pytest.raises(NotCommitted, match=told),
        ):
            manager.restore_if_any(state(0))


def test_records_without_checkpoints_are_an_error(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, state(3))
    shutil.rmtree(tmp_path / "step-3")
    (tmp_path / "step-9.json").write_text("{}")  # of somebody else
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(NotCommitted, match=r"step-3\.json tells of .* gone\. .*to begin anew"):
            manager.restore_if_any(state(0))
        (tmp_path / "step-3.json").unlink()
        assert manager.restore_if_any(state(0)) is None


def test_a_run_that_has_only_what_it_went_back_from_does_not_begin_anew(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.restore(state(0), step=1)
        manager.save(2, state(2))
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}.json").unlink()
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(NotCommitted, match=r"gone back from all .*\(step-3\).*by its step"):
            manager.restore_if_any(state(0))
        got = state(0)
        manager.restore(got, step=3)
        assert got["step"] == 3


def test_a_root_without_checkpoints_is_a_first_start(tmp_path: Path) -> None:
    (tmp_path / "used" / "logs").mkdir(parents=True)
    (tmp_path / "used" / "config.json").write_text("{}")
    (tmp_path / "used" / "logs" / "events.out").write_text("x")
    dead = tmp_path / "dead" / "step-3" / "data" / "0123456789abcdef"
    dead.mkdir(parents=True)
    (dead / "00000.safetensors").write_bytes(b"x")
    for root in ("absent", "used", "dead"):
        with CheckpointManager(tmp_path / root) as manager:
            assert manager.restore_if_any(state(0)) is None
            assert manager.save(1, state(1))


def test_a_listing_that_lags_behind_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    ckpt.save(state(3), store.substore("step-3"))
    exists = MemoryStore.exists

    def lagging(self: MemoryStore, name: str) -> bool:
        return "manifest" not in name and exists(self, name)

    monkeypatch.setattr(MemoryStore, "exists", lagging)
    with (
        CheckpointManager(store) as manager,
        pytest.raises(StorageError, match=r"step-3 is listed, .*Try again"),
    ):
        manager.restore_if_any(state(0))


def test_newer_checkpoints_of_other_names_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt.save(state(5), tmp_path / "step-5")
    ckpt.save(state(4), tmp_path / "old-4")
    with CheckpointManager(tmp_path) as manager, caplog.at_level(logging.WARNING):
        manager.restore_if_any(state(0))
        assert not caplog.records
        ckpt.save(state(10), tmp_path / "step_10")
        got = state(0)
        manager.restore_if_any(got)
    assert got["step"] == 5
    assert "going on from step 5, though step_10 is here as well" in caplog.text
