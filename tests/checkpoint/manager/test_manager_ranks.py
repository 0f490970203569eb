"""``CheckpointManager`` on several ranks: one decides, all do the same, nobody waits for ever."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import Best, CheckpointManager, EveryMinutes, EverySteps, Keep
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import AlreadyCommitted, CheckpointError, Corrupt, LayoutMismatch
from dtckpt.storage import FaultyStore, LocalStore, RaiseError, Rule, StorageError, Store

from ...ranks import RanksFailed, run_ranks

ROWS = 12


def state(group: dist.ProcessGroup, rank: int, value: float) -> dict[str, Any]:
    size = dist.get_world_size(group)
    mesh = DeviceMesh("cpu", Mesh((size,)), groups=[group])
    rows = ROWS // size
    first = rank * rows
    local = torch.arange(first, first + rows, dtype=torch.float32)[:, None].repeat(1, 50) + value
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], shape=(ROWS, 50)), "step": value}


def expected(value: float) -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float32)[:, None].repeat(1, 50) + value


def whole(root: Path, step: int) -> torch.Tensor:
    return dcp.open(root / f"step-{step}")["w"][:]


def test_a_run_on_three_ranks_goes_on_with_two(tmp_path: Path) -> None:
    def three(rank: int, group: dist.ProcessGroup) -> tuple[object, ...]:
        with CheckpointManager(
            tmp_path, when=EverySteps(2), keep=Keep(last=2), process_group=group
        ) as manager:
            assert manager.restore_if_any(state(group, rank, 0)) is None
            saved = [n for n in range(1, 9) if manager.save(n, state(group, rank, n))]
            manager.wait()
            return saved, manager.all_steps(), manager.latest()

    assert run_ranks(3, three) == [([2, 4, 6, 8], (6, 8), 8)] * 3

    def two(rank: int, group: dist.ProcessGroup) -> float:
        with CheckpointManager(tmp_path, process_group=group) as manager:
            got = state(group, rank, 0)
            manager.restore(got)
            assert torch.equal(got["w"].to_local(), state(group, rank, 8)["w"].to_local())
            manager.save(9, got, metrics={"loss": 1.0})
            manager.wait()
            assert manager.best(Best(metric="loss")) == 9
            return got["step"]

    assert run_ranks(2, two) == [8, 8]
    assert torch.equal(whole(tmp_path, 9), expected(8))


def test_all_save_the_same_step_when_the_clock_asks(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        with CheckpointManager(
            tmp_path, when=EveryMinutes(1e-3 / 60), process_group=group
        ) as manager:
            saved: list[int] = []
            for step in range(1, 4000):
                if manager.save(step, lambda: state(group, rank, step)):  # noqa: B023
                    saved.append(step)
                if len(saved) == 2:
                    break
                threading.Event().wait(0.002)
            return saved

    first, *others = run_ranks(3, body)
    assert len(first) == 2
    assert others == [first, first]


def test_a_damaged_checkpoint_is_passed_over_by_all(tmp_path: Path) -> None:
    def save(rank: int, group: dist.ProcessGroup) -> None:
        with CheckpointManager(tmp_path, process_group=group) as manager:
            for step in (1, 2, 3):
                manager.save(step, state(group, rank, step))

    run_ranks(2, save)
    (path,) = (tmp_path / "step-3" / "data").glob("*/00001.safetensors")
    data = bytearray(path.read_bytes())
    data[-3000] ^= 4
    path.write_bytes(data)

    def restore(rank: int, group: dist.ProcessGroup) -> tuple[str, list[str]]:
        with CheckpointManager(tmp_path, process_group=group) as manager:
            got = state(group, rank, 0)
            report = manager.restore(got)
            assert torch.equal(got["w"].to_local(), state(group, rank, 2)["w"].to_local())
            return report.url, list(report.passed_over)

    told = str(tmp_path / "step-2"), [str(tmp_path / "step-3")]
    assert run_ranks(2, restore) == [told, told]


def test_other_roots_on_other_ranks_are_told(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        manager = CheckpointManager(tmp_path / str(rank), process_group=group)
        with pytest.raises(LayoutMismatch, match="not given the same root"):
            manager.restore_if_any(state(group, rank, 0))
        with pytest.raises(LayoutMismatch, match="not given the same root"):
            manager.save(1, state(group, rank, 1))

    run_ranks(2, body)


def test_disks_that_are_not_shared_are_told(tmp_path: Path) -> None:
    """The same path, but on every host another disk behind it."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        store: Any = FaultyStore(LocalStore(tmp_path / str(rank)), [])
        substore = store.substore

        def shared(prefix: str) -> Store:
            place = substore(prefix)
            place.url = f"/shared/{prefix}"
            return place

        store.url, store.substore = "/shared", shared
        manager = CheckpointManager(store, process_group=group, on_failure="warn")
        manager.save(1, state(group, rank, 1))
        manager.close()
        ((_, error),) = manager.failures
        assert "All ranks must save to storage that they share" in str(error)

    run_ranks(2, body)


def test_one_ranks_dead_disk_costs_one_checkpoint(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        rules = [Rule(RaiseError(StorageError("dead disk")), op="write", name="step-2/*")]
        store = FaultyStore(LocalStore(tmp_path), rules if rank == 1 else [])
        with CheckpointManager(
            store, process_group=group, on_failure="warn", incremental=5
        ) as manager:
            for step in range(1, 5):
                manager.save(step, state(group, rank, step))
            manager.wait()
            assert manager.all_steps() == (1, 3, 4)
            ((_, error),) = manager.failures
            assert "dead disk" in str(error)
            assert "rank 1" in str(error)
            return [step for step, _ in manager.failures]

    assert run_ranks(3, body) == [[2]] * 3
    for step in (1, 3, 4):
        assert torch.equal(whole(tmp_path, step), expected(step))


def test_errors_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with CheckpointManager(tmp_path, process_group=group) as manager:
            manager.save(5, state(group, rank, 5))
        manager = CheckpointManager(tmp_path, process_group=group)
        with pytest.raises(AlreadyCommitted, match="up to step 5"):
            manager.save(5, state(group, rank, 5))
        with pytest.raises(dcp.NotCommitted, match="it has 5"):
            manager.restore(state(group, rank, 0), step=4)

        def give() -> dict[str, Any]:
            if rank == 1:
                raise RuntimeError("no state here")
            return state(group, rank, 6)

        with pytest.raises(CheckpointError, match="no state here"):
            manager.save(6, give, force=True)
        manager.close()

    run_ranks(2, body)


def test_a_rank_that_dies_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        manager = CheckpointManager(
            tmp_path, process_group=group, timeout=timedelta(seconds=3), on_failure="warn"
        )
        manager.save(1, state(group, rank, 1))
        manager.wait()
        if rank == 1:
            raise KeyError("dies")
        manager.save(2, state(group, rank, 2))
        manager.close()
        assert [step for step, _ in manager.failures] == [2]

    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, body)
    assert set(caught.value.errors) == {1}
    assert [step.number for step in dcp.committed_steps(tmp_path)] == [1]


def test_none_whole_is_the_same_error_everywhere(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with CheckpointManager(tmp_path, process_group=group) as manager:
            manager.save(1, state(group, rank, 1))
            manager.wait()
            if rank == 0:
                for path in (tmp_path / "step-1" / "data").glob("*/*"):
                    path.unlink()
            with pytest.raises(Corrupt, match="none of the checkpoints here can be loaded"):
                manager.restore_if_any(state(group, rank, 0))

    run_ranks(2, body)


def test_a_rank_that_leaves_by_an_error_waits_for_its_save_and_for_nobody(tmp_path: Path) -> None:
    has_left = threading.Event()

    def train(rank: int, group: dist.ProcessGroup) -> None:
        with CheckpointManager(
            tmp_path, process_group=group, timeout=timedelta(seconds=3)
        ) as manager:
            manager.save(1, state(group, rank, 1))
            if rank == 1:
                raise KeyError("mine")
            assert has_left.wait(60)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        if rank == 0:
            train(rank, group)
            return
        try:
            with pytest.raises(KeyError) as caught:
                train(rank, group)
        finally:
            has_left.set()
        assert not getattr(caught.value, "__notes__", [])

    run_ranks(2, body)
    assert torch.equal(whole(tmp_path, 1), expected(1))
