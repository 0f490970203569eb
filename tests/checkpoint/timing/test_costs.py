"""What saves and loads cost, over several ranks: by name, without another round, bounded."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.ranks.base import Solo
from dtckpt.checkpoint.saving.job import SaveJob
from dtckpt.checkpoint.timing.costs import PHASES, in_order
from dtckpt.checkpoint.timing.recorder import Recorder, Told
from dtckpt.dtensor import DeviceMesh, DTensor, Shard
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import rank_mesh
from ...ranks import RanksFailed, run_ranks
from ..failures import Sabotage

_c10d: Any = dist

SIZE = 3
SLOW = 0.2


def saved_and_loaded(
    store: MemoryStore, *, dim: int = 0, background: bool = False, **options: Any
) -> list[tuple[ckpt.Costs, ckpt.Costs]]:
    """Save rows and load them along a dim; return what that cost each rank."""
    hub = _c10d.HashStore()

    def tensor(mesh: DeviceMesh, value: float, at: int) -> DTensor:
        shape = (SIZE * 40, SIZE * 40)
        local = (40, shape[1]) if at == 0 else (shape[0], 40)
        return DTensor.from_local(torch.full(local, value), mesh, (Shard(at),))

    def body(rank: int, group: Any) -> tuple[ckpt.Costs, ckpt.Costs]:
        mesh = rank_mesh(hub, (SIZE,), rank, group)
        state = {"w": tensor(mesh, 1.0, 0), "step": 3}
        if background:
            saved = ckpt.async_save(state, store, process_group=group).result()
        else:
            saved = ckpt.save(state, store, process_group=group)
        into = tensor(mesh, 0.0, dim)
        state = {"w": into, "step": 0}
        loaded = ckpt.load(state, store, process_group=group, **options)
        assert bool((into.to_local() == 1).all())
        return saved.costs, loaded.costs

    return run_ranks(SIZE, body)


def names(costs: ckpt.Costs) -> list[str]:
    return [phase.phase for phase in costs.phases]


@pytest.mark.parametrize("background", [False, True])
def test_all_ranks_have_one_summary_and_their_own_numbers(background: bool) -> None:
    found = saved_and_loaded(MemoryStore(), background=background)
    stages = ["stage"] if background else []
    for rank, (saved, loaded) in enumerate(found):
        assert (saved.rank, saved.num_ranks, saved.kind, loaded.kind) == (
            rank,
            SIZE,
            "save",
            "load",
        )
        commits = ["commit"] if rank == 0 else []
        assert names(saved) == ["queue", "plan", *stages, "write", *commits]
        manifests = ["manifest"] if rank == 0 else []
        assert names(loaded) == [*manifests, "match", "plan", "read", "fill"]
        assert saved.summary == found[0][0].summary
        assert loaded.summary == found[0][1].summary
        assert saved.phase("write").num_bytes > 40 * 120 * 4
        assert loaded.phase("read").num_bytes == 40 * 120 * 4
        assert 0 < saved.stall_seconds <= saved.seconds
        assert (saved.stall_seconds < saved.seconds) == background
        assert sum(p.seconds + p.waited_seconds for p in saved.phases) <= saved.seconds
    whole = {phase.phase: phase for phase in found[0][0].summary}
    assert list(whole) == ["queue", "plan", *stages, "write", "commit"]
    assert whole["write"].total_bytes == sum(s.phase("write").num_bytes for s, _ in found)
    assert (whole["write"].num_ranks, whole["commit"].num_ranks) == (SIZE, 1)
    own = found[0][0].phase("commit").seconds
    assert whole["commit"].max_seconds == pytest.approx(own, abs=1e-6)
    read = next(phase for phase in found[0][1].summary if phase.phase == "read")
    assert read.total_bytes == SIZE * 40 * 120 * 4
    assert read.min_seconds <= read.median_seconds <= read.max_seconds


def test_the_slowest_rank_is_named_and_those_that_wait_for_it_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = SaveJob.write_part

    def slowly(self: SaveJob, *given: Any) -> Any:
        if self.ranks.rank == 1:
            time.sleep(SLOW)
        return write(self, *given)

    monkeypatch.setattr(SaveJob, "write_part", slowly)
    monkeypatch.setattr("socket.gethostname", lambda: f"host-of-{threading.current_thread().name}")
    with caplog.at_level(logging.INFO, "dtckpt.checkpoint"):
        found = saved_and_loaded(MemoryStore())
    for saved, _ in found:
        slow = saved.slowest
        assert slow is not None
        assert (slow.phase, slow.slowest_rank) == ("write", 1)
        assert slow.slowest_host == found[1][0].host != found[0][0].host
        assert slow.min_seconds < SLOW <= slow.max_seconds
        assert f"rank 1 is on {slow.slowest_host}" in str(saved)
    logged = [r.getMessage() for r in caplog.records if r.getMessage().startswith("saved ")]
    assert len(logged) == SIZE
    assert all(f"slowest of all: write on rank 1 ({found[1][0].host})" in m for m in logged)
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_waiting_for_others_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = SaveJob.describe

    def slowly(self: SaveJob, *given: Any) -> Any:
        if self.ranks.rank == 2:
            time.sleep(SLOW)
        return describe(self, *given)

    monkeypatch.setattr(SaveJob, "describe", slowly)
    for rank, (saved, _) in enumerate(saved_and_loaded(MemoryStore())):
        plan = saved.phase("plan")
        assert (plan.seconds >= SLOW) == (rank == 2)
        assert plan.seconds + plan.waited_seconds >= SLOW * 0.9
        assert next(p for p in saved.summary if p.phase == "plan").slowest_rank == 2


@pytest.mark.parametrize("dim", [0, 1])
def test_what_ranks_read_for_each_other_is_told(dim: int) -> None:
    found = saved_and_loaded(MemoryStore(), dim=dim, read_once=True)
    received = [costs.phase("receive").num_bytes for _, costs in found]
    assert all(costs.summary == found[0][1].summary for _, costs in found)
    phases = {phase.phase: phase for phase in found[0][1].summary}
    assert phases["read"].total_bytes == SIZE * 40 * 120 * 4
    if dim:
        assert phases["receive"].total_bytes == sum(received) == SIZE * 40 * 120 * 4 * 2 // 3


def test_no_round_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage, store = Sabotage(monkeypatch), MemoryStore()

    def body(rank: int, group: Any) -> list[str]:
        sabotage.arm(rank, None)
        ckpt.save({"step": 3}, store, process_group=group)
        ckpt.load({"step": 0}, store, process_group=group)
        return sabotage.phases[rank]

    rounds = ["save: plan", "save: write", "save: commit"]
    rounds += ["load: read manifest", "load: plan", "load: read"]
    assert run_ranks(2, body) == [rounds, rounds]


def test_a_failing_save_fails_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: SaveJob, *_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SaveJob, "write_part", fail)
    with pytest.raises(RanksFailed, match="No space left on device"):
        saved_and_loaded(MemoryStore())


def of_many_ranks(size: int) -> tuple[Recorder, dict[int, Told]]:
    """Return a recorder and what so many ranks tell at the end of a save."""
    recorder = Recorder("save", Solo(0))
    phases = PHASES["save"][:-1]
    told: dict[int, Told] = {
        rank: [f"node-{rank // 8:05}.cluster.example.com", {p: [0.125, 1 << 30] for p in phases}]
        for rank in range(size)
    }
    for phase in phases:
        with recorder.phase(phase) as opened:
            opened.num_bytes = 1 << 30
    told[9][1]["write"] = [3.5, 7]
    return recorder, told


def test_a_summary_is_as_long_for_many_ranks_as_for_some() -> None:
    recorder, told = of_many_ranks(16_384)
    summary = json.dumps(recorder.summarize(told))
    small, some = of_many_ranks(16)
    assert len(summary) < len(json.dumps(small.summarize(some))) + 100 < 1000
    assert len(json.dumps(told[0])) < 250
    recorder.learn(json.loads(summary))
    costs = recorder.costs("runs/a")
    slow = costs.slowest
    assert slow is not None
    assert (slow.slowest_rank, slow.max_seconds, slow.num_ranks) == (9, 3.5, 16_384)
    assert (slow.median_seconds, slow.total_bytes) == (0.125, (16_383 << 30) + 7)
    assert slow.slowest_host == "node-00001.cluster.example.com"


def test_a_table_fits_a_terminal() -> None:
    recorder, told = of_many_ranks(16_384)
    told[16_383][1]["write"] = [86_399.9, 999_999_999_999_999]
    recorder.learn(recorder.summarize(told))
    costs = recorder.costs("s3://bucket/run")
    lines = str(costs).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) < 16
    assert "24.0 h" in str(costs)
    assert "rank 16383 is on node-02047.cluster.example.com" in lines


def test_phases_are_counted_where_they_fail_and_within_each_other() -> None:
    recorder = Recorder("save", Solo(0))
    with recorder.phase("plan"):
        time.sleep(0.01)
        with recorder.phase("queue"):
            time.sleep(0.1)
    with pytest.raises(OSError, match="full"), recorder.phase("write"):
        raise OSError("full")
    costs = recorder.costs("runs/a")
    assert names(costs) == ["queue", "plan", "write"]
    assert costs.phase("queue").seconds >= 0.1
    assert 0.01 <= costs.phase("plan").seconds < costs.phase("queue").seconds
    assert [span.phase for span in costs.spans] == ["queue", "plan", "write"]
    assert costs.spans[1].seconds >= 0.11


def test_very_many_turns_are_all_summed_and_not_all_kept() -> None:
    recorder = Recorder("load", Solo(0))
    for _ in range(2000):
        with recorder.phase("read") as opened:
            opened.num_bytes = 1
    costs = recorder.costs("runs/a")
    assert costs.phase("read").num_bytes == 2000
    assert len(costs.spans) < 300


def test_phases_come_in_their_order_and_unknown_ones_last() -> None:
    assert in_order("save", ["other", "write", "plan", "write"]) == ["plan", "write", "other"]


def test_what_is_copied_and_what_is_written_are_told_apart(tmp_path: Path) -> None:
    state = {"w": torch.ones(100_000), "step": 1}
    ckpt.save(state, tmp_path / "a")
    saved = ckpt.async_save(state, tmp_path / "b", base=tmp_path / "a").result()
    assert saved.costs.phase("stage").num_bytes == 400_000
    assert saved.costs.phase("write").num_bytes < 10_000  # the tensor lies in the base
    assert "costs" not in repr(saved)
