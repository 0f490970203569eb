"""A training on a disk that is full goes on, and saves again once there is room."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.runs.run import Run
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import StorageError

from ...ranks import run_ranks
from ...storage.small_disks import small_disk_at

MIB = 1 << 20
ROWS = MIB // 4 * 3
"""Of 4 bytes: a checkpoint has 3 MiB, and two of them fit."""


def state_at(step: int, group: dist.ProcessGroup) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", Mesh((2,)), groups=[group])
    local = torch.full((ROWS // 2,), float(step))
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], shape=(ROWS,)), "step": step}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_fills_and_gets_room_again(tmp_path: Path, in_background: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def body(rank: int, group: dist.ProcessGroup) -> tuple[tuple[int, ...], list[int]]:
        def save(step: int) -> None:
            manager.save(step, state_at(step, group))
            manager.wait()
            group.barrier().wait()

        with ckpt.CheckpointManager(
            disk / "run",
            on_failure="warn",
            in_background=in_background,
            process_group=group,
        ) as manager:
            save(1)
            save(2)
            save(3)
            full = [error for _, error in manager.failures]
            assert len(full) == 1
            assert isinstance(full[0], StorageError)
            assert full[0].errno == errno.ENOSPC
            assert "bytes are free" in str(full[0])
            assert manager.latest() == 2
            if rank == 0:
                shutil.rmtree(disk / "run" / "step-1")
            group.barrier().wait()
            save(4)
            return manager.all_steps(), [step for step, _ in manager.failures]

    with small_disk_at(disk):
        assert run_ranks(2, body) == [((2, 4), [3])] * 2
        with ckpt.open(disk / "run" / "step-4") as checkpoint:
            assert torch.equal(checkpoint["w"][:], torch.full((ROWS,), 4.0))
        assert not ckpt.verify(disk / "run" / "step-4").problems
        assert list((disk / "run").glob("step-3/data/*/*")) == []


def test_a_full_disk_is_left_for_another_place(tmp_path: Path) -> None:
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    disk.mkdir()

    def body(rank: int, group: dist.ProcessGroup) -> tuple[tuple[int, ...], bool]:
        with ckpt.CheckpointManager(
            disk / "run", elsewhere=[elsewhere], process_group=group
        ) as manager:
            for step in (1, 2, 3):
                manager.save(step, state_at(step, group))
                manager.wait()
            report = manager.wait()
            assert report is not None
            return manager.all_steps(), report.url == str(elsewhere / "step-3")

    with small_disk_at(disk):
        assert run_ranks(2, body) == [((1, 2, 3), True)] * 2
    with ckpt.open(elsewhere / "step-3") as checkpoint:
        assert torch.equal(checkpoint["w"][:], torch.full((ROWS,), 3.0))


@pytest.mark.parametrize("in_background", [False, True])
def test_saves_in_a_row_need_space_for_one_more_than_stay(
    tmp_path: Path, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the deletion of those that need not stay is."""
    delete = Run.delete

    def delete_slowly(run: Run, name: str) -> None:
        time.sleep(0.2)
        delete(run, name)

    monkeypatch.setattr(Run, "delete", delete_slowly)
    disk = tmp_path / "disk"
    disk.mkdir()
    state = {"w": torch.zeros(ROWS)}
    with (
        small_disk_at(disk),
        ckpt.CheckpointManager(
            disk / "run", keep=ckpt.Keep(last=1), on_failure="warn", in_background=in_background
        ) as manager,
    ):
        for step in range(5):
            manager.save(step, state)
        manager.wait()
        assert not manager.failures
        assert manager.latest() == 4
