"""The directory of a run: what in it is the run's own, and what of it is told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import Best, CheckpointManager, Keep
from dtckpt.checkpoint.manager import saves
from dtckpt.checkpoint.runs.finding import Sighting, find_newest
from dtckpt.checkpoint.runs.record import StepRecord
from dtckpt.checkpoint.runs.run import ABANDONED, Run
from dtckpt.checkpoint.runs.upkeep import Upkeep
from dtckpt.errors import CheckpointError, InUse, NotCommitted
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


def test_a_record_of_a_newer_version_is_not_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "step-1.json"
    newer = json.dumps({**json.loads(path.read_text()), "version": 2})
    path.write_text(newer)
    keep = Keep(last=1, best=Best(metric="loss"))
    with CheckpointManager(tmp_path, keep=keep) as manager:
        manager.restore(state(0))
        manager.save(3, state(3), metrics={"loss": 3})
        manager.wait()
        assert manager.all_steps() == (1, 2, 3)  # who cannot tell which is the best deletes none
        with pytest.raises(CheckpointError, match="version 2"):
            manager.best()
    assert path.read_text() == newer
    assert "Use the version of dtckpt that wrote it" in caplog.text


def test_what_is_saved_while_others_are_deleted_keeps_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_saved, delete = threading.Event(), Run.delete

    def slowly(run: Run, name: str) -> None:
        assert all_saved.wait(60)
        delete(run, name)

    monkeypatch.setattr(Run, "delete", slowly)
    monkeypatch.setattr(saves, "_DELETION_SECONDS", 0.05)  # which saves wait for it
    keep = Keep(last=1, best=Best(metric="loss"))
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in enumerate([5, 4, 3, 1, 2], start=1):
            manager.save(step, state(step), metrics={"loss": loss})
        assert (handle := manager.saving) is None or handle.result()
        all_saved.set()
        manager.wait()
        assert manager.all_steps() == (4, 5)
        assert manager.best() == 4
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-4", "step-4.json", "step-5", "step-5.json",
    }  # fmt: skip


def test_a_step_is_the_one_of_the_line_wherever_it_is() -> None:
    runs = Run(MemoryStore()), Run(MemoryStore())
    for run in runs:
        ckpt.save(state(5), run.place_of(5))
    runs[0].mark("step-5", ABANDONED)  # and was away when it was to make way for the other one
    assert find_newest(runs).found == find_newest(runs, step=5).found == Sighting(5, 1)
    runs[1].delete("step-5")
    with pytest.raises(
        NotCommitted, match=r"gone back from all checkpoints that are here \(step-5"
    ):
        find_newest(runs)
    assert find_newest(runs, step=5).found == Sighting(5, 0)


def test_a_process_that_waits_for_nothing_leaves_metrics(tmp_path: Path) -> None:
    script = f"""
import time, torch
from dtckpt.checkpoint import CheckpointManager
from dtckpt.checkpoint.runs.run import Run
write = Run.write_record
Run.write_record = lambda run, record: (time.sleep(0.5), write(run, record))
manager = CheckpointManager({str(tmp_path)!r})
manager.save(1, {{"w": torch.ones(64)}}, metrics={{"loss": 0.5}})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert json.loads((tmp_path / "step-1.json").read_text())["metrics"] == {"loss": 0.5}


def test_metrics_of_another_process_decide_what_is_deleted(tmp_path: Path) -> None:
    best = Best(metric="eval", mode="max")
    with CheckpointManager(tmp_path, keep=Keep(last=2, best=best)) as manager:
        for step in range(6):
            manager.save(step, state(step))
            manager.wait()
            if step in (1, 2):  # which the manager has read or written itself before
                CheckpointManager(tmp_path).set_metrics(step, {"eval": 9.0 - step})
        assert manager.best() == 1
        CheckpointManager(tmp_path).set_metrics(5, {"eval": 20.0})
        assert manager.best() == 5
        manager.wait()
        assert manager.all_steps() == (1, 4, 5)


def test_a_record_is_written_beside_metrics_of_another_process() -> None:
    store = MemoryStore()
    ckpt.save(state(1), store.substore("step-1"))
    (seen,) = Run(store).look().steps
    save_id = Run(store).make_record(seen).save_id
    Run(store).set_metrics(seen, {"eval": 2.0, "loss": 7.0})
    ours = Run(store)
    ours.note(StepRecord(step=1, save_id=save_id, saved_at=5.0, metrics={"loss": 1.0}))
    ours.write_noted()
    found = Run(store).record_of(1)
    assert found is not None
    assert found.metrics == {"eval": 2.0, "loss": 1.0}
    ours.note(StepRecord(step=1, save_id="another", saved_at=6.0, metrics={"loss": 3.0}))
    ours.write_noted()
    found = Run(store).record_of(1)
    assert found is not None
    assert found.metrics == {"loss": 3.0}


def test_what_is_written_anew_keeps_metrics_of_another_process() -> None:
    store = MemoryStore()
    ckpt.save(state(1), store.substore("step-1"))
    ours = Run(store)
    (seen,) = ours.look().steps
    ours.make_record(seen)
    Run(store).set_metrics(seen, {"eval": 2.0})
    ours.detached("step-1", "another")
    found = Run(store).record_of(1)
    assert found is not None
    assert (found.save_id, found.metrics) == ("another", {"eval": 2.0})
    ckpt.save({**state(1), "n": 1}, store.substore("step-2"), base=store.substore("step-1"))
    Run(store).set_metrics(seen, {"eval": 3.0})
    with pytest.raises(InUse):
        ours.delete("step-1")
    found = Run(store).record_of(1)
    assert found is not None
    assert found.metrics == {"eval": 3.0}
