"""A run over several places on several ranks: each brings its own file."""

from __future__ import annotations

from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import CheckpointManager, Tier
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import StorageError
from dtckpt.storage import (
    Call,
    Fault,
    FaultyStore,
    LocalStore,
    RaiseError,
    Rule,
    start_agent,
    stop_agent,
)
from dtckpt.storage.peers import job

from ...ranks import run_ranks
from .test_tiers import Gate, steps

ROWS = 12


def shards(group: dist.ProcessGroup, rank: int, value: float) -> dict[str, Any]:
    size = dist.get_world_size(group)
    mesh = DeviceMesh("cpu", Mesh((size,)), groups=[group])
    local = torch.full((ROWS // size, 500), value) + rank
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], shape=(ROWS, 500)), "step": value}


def test_each_rank_copies_its_own_file_and_another_number_goes_on(tmp_path: Path) -> None:
    fast, root = tmp_path / "fast", tmp_path / "root"

    def three(rank: int, group: dist.ProcessGroup) -> list[str]:
        store = FaultyStore(LocalStore(root))
        with CheckpointManager(store, tiers=[Tier(fast)], process_group=group) as manager:
            for step in range(1, 5):
                manager.save(step, shards(group, rank, step))
        return sorted({c.name[-17:] for c in store.calls if c.op == "create"})

    assert run_ranks(3, three) == [[f"0000{rank}.safetensors"] for rank in range(3)]
    assert steps(root)[-1] == 4
    assert dcp.verify(root / "step-4").problems == ()
    assert [step.number for step in dcp.committed_steps(fast)] == [4]

    def two(rank: int, group: dist.ProcessGroup) -> float:
        with CheckpointManager(root, tiers=[Tier(fast)], process_group=group) as manager:
            got = shards(group, rank, 0)
            manager.restore(got)
            return got["step"]

    assert run_ranks(2, two) == [4, 4]


def test_one_ranks_failure_is_everyones_and_costs_one_promotion(tmp_path: Path) -> None:
    fast, root = tmp_path / "fast", tmp_path / "root"

    def body(rank: int, group: dist.ProcessGroup) -> str:
        rules = [Rule(RaiseError(StorageError(EIO, "link down")), op="write", name="step-1/*")]
        store = FaultyStore(LocalStore(root), rules if rank == 1 else [])
        with CheckpointManager(store, tiers=[Tier(fast)], process_group=group) as manager:
            manager.save(1, shards(group, rank, 1))
            manager._saves.settle()  # pyright: ignore[reportPrivateUsage]
            manager._promotions.wait()  # pyright: ignore[reportPrivateUsage]
            ((step, error),) = manager.failures
            assert (step, "rank 1" in str(error)) == (1, True)
            manager.save(2, shards(group, rank, 2))
        return str(error)

    assert len(set(run_ranks(3, body))) == 1
    assert steps(root) == [2]
    assert not list(root.glob("step-1/data/*/*"))
    assert dcp.verify(root / "step-2").problems == ()


def test_disks_that_are_not_shared_are_told(tmp_path: Path) -> None:
    """Ranks that do not see the same tier."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        manager = CheckpointManager(
            tmp_path / "root",
            tiers=[Tier(_posing_as("/local", tmp_path / str(rank)))],
            process_group=group,
            on_failure="warn",
        )
        manager.save(1, shards(group, rank, 1))
        manager.close()
        ((_, error),) = manager.failures
        assert "All ranks must save to storage that they share" in str(error)

    run_ranks(2, body)
    assert steps(tmp_path / "root") == []


def _posing_as(url: str, path: Path) -> Any:
    store: Any = FaultyStore(LocalStore(path))
    inner = store.substore

    def substore(prefix: str) -> Any:
        place = inner(prefix)
        place.url = f"{url}/{prefix}"
        return place

    store.url, store.substore = url, substore
    return store


def test_the_memory_of_an_agent_is_a_tier(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sockets have short names only.
    monkeypatch.setenv(job.FOLDER, str(tmp_path_factory.mktemp("a") / "agents"))
    root, tier = tmp_path / "root", Tier("peers://tiers")
    start_agent("tiers", budget_bytes=1 << 24)
    gate = Gate()

    def plan(call: Call) -> Fault | None:
        return gate if call.op == "create" and call.name.startswith("step-1/data") else None

    def save(rank: int, group: dist.ProcessGroup) -> list[str]:
        store = FaultyStore(LocalStore(root), plan)
        with CheckpointManager(store, tiers=[tier], process_group=group) as manager:
            for step in (1, 2, 3, 4):
                manager.save(step, shards(group, rank, step))
                assert manager.saving is None or manager.saving.result(60)
            gate.opened.set()
            manager.wait()
            assert manager.failures == ()
            return [str(manager.latest())]

    def go_on(rank: int, group: dist.ProcessGroup) -> tuple[str, float]:
        with CheckpointManager(root, tiers=[tier], process_group=group) as manager:
            got = shards(group, rank, 0)
            return manager.restore(got).url, got["step"]

    try:
        assert run_ranks(2, save) == [["4"], ["4"]]
        # The agent has kept the first for as long as it was on its way.
        assert steps(root) == [1, 4]
        assert [step.number for step in dcp.committed_steps("peers://tiers")] == [4]
        assert run_ranks(3, go_on) == [("peers://tiers/step-4", 4)] * 3
    finally:
        stop_agent("tiers")
    assert run_ranks(2, go_on) == [(str(root / "step-4"), 4)] * 2
