"""A run over several places: saves go to the fastest, and from there to the durable one."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import Best, CheckpointManager, Emergency, EverySteps, Keep, OnSignals, Tier
from dtckpt.checkpoint.runs.upkeep import Worker
from dtckpt.errors import AlreadyCommitted, Corrupt, StorageError
from dtckpt.storage import (
    Call,
    Fault,
    FaultyStore,
    LocalStore,
    RaiseError,
    Rule,
)

from ...ranks import run_ranks


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3000,), value), "step": value}


def steps(root: Path) -> list[int]:
    return [step.number for step in dcp.committed_steps(root)]


def value_of(place: Path) -> float:
    got = state(0)
    dcp.load(got, place)
    assert torch.equal(got["w"], state(got["step"])["w"])
    return got["step"]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Gate(Fault):
    """Holds a call until it is opened."""

    __slots__ = ("met", "opened")

    def __init__(self) -> None:
        self.opened, self.met = threading.Event(), threading.Event()

    def before(self) -> None:
        self.met.set()
        assert self.opened.wait(30)


@pytest.mark.parametrize("in_background", [True, False])
def test_saves_come_to_every_place_and_each_keeps_its_own(
    tmp_path: Path, in_background: bool
) -> None:
    fast, disk, root = (tmp_path / name for name in ("fast", "disk", "root"))
    with CheckpointManager(
        root,
        tiers=[Tier(fast), Tier(disk, keep=Keep(last=2))],
        keep=Keep(last=3),
        in_background=in_background,
    ) as manager:
        for step in range(1, 6):
            manager.save(step, state(step), metrics={"loss": 10.0 - step}, force=True)
        manager.wait()
        assert manager.failures == ()
        manager.pin(3)
        assert manager.all_steps() == (3, 4, 5)
        assert manager.best(Best(metric="loss")) == 5
        manager.set_metrics(4, {"loss": 0.5})
        assert manager.best(Best(metric="loss")) == 4
    assert (steps(fast), steps(disk), steps(root)) == ([5], [4, 5], [3, 4, 5])
    with CheckpointManager(root) as manager:  # which has the records, too
        assert manager.best(Best(metric="loss", mode="max")) == 3
    for place in (fast, disk, root):
        assert dcp.verify(place / "step-5").problems == ()
    fast_files = sorted(p.read_bytes() for p in (fast / "step-5").rglob("*") if p.is_file())
    assert fast_files == sorted(p.read_bytes() for p in (root / "step-5").rglob("*") if p.is_file())
    with CheckpointManager(root, tiers=[Tier(fast), Tier(disk)]) as manager:
        got = state(0)
        assert manager.restore(got).url == str(fast / "step-5")
        assert manager.restore(got, step=4).url == str(disk / "step-4")
        assert manager.restore(got, step=3).url == str(root / "step-3")
        assert got["step"] == 3


def test_what_is_overtaken_is_left_out_and_what_must_come_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    def plan(call: Call) -> Fault | None:
        return gate if call.op == "create" and call.name.startswith("step-1/data") else None

    with (
        caplog.at_level(logging.INFO),
        CheckpointManager(
            FaultyStore(LocalStore(tmp_path / "root"), plan),
            tiers=[Tier(tmp_path / "fast")],
            keep=Keep(last=10, every=5),
        ) as manager,
    ):
        manager.save(1, state(1))
        assert gate.met.wait(30)
        for step in range(2, 9):
            manager.save(step, state(step), force=step == 3)
            assert manager.saving is None or manager.saving.result()
            assert {1, 3}.intersection(range(step)) <= set(steps(tmp_path / "fast"))
        assert len(steps(tmp_path / "fast")) <= 6
        gate.opened.set()
    assert steps(tmp_path / "root") == [1, 3, 5, 8]
    assert steps(tmp_path / "fast") == [8]
    assert "step 4 is not promoted: a newer one" in caplog.text


def test_the_training_does_not_wait_for_the_root(tmp_path: Path) -> None:
    gate = Gate()
    root = FaultyStore(
        LocalStore(tmp_path / "root"), lambda call: gate if call.op == "create" else None
    )
    manager = CheckpointManager(root, tiers=[Tier(tmp_path / "fast")])
    manager.save(1, state(1))
    assert gate.met.wait(30)
    manager.save(2, state(2))
    assert manager.saving is None or manager.saving.result()
    assert 2 in steps(tmp_path / "fast")
    gate.opened.set()
    manager.close()
    assert steps(tmp_path / "root") == [1, 2]


@pytest.mark.parametrize("op", ["create", "write", "close", "publish"])
def test_a_promotion_that_fails_leaves_nothing_half(tmp_path: Path, op: str) -> None:
    rules = [Rule(RaiseError(StorageError(EIO, "full")), op=op, name="step-2/*")]
    store = FaultyStore(LocalStore(tmp_path / "root"), rules)
    with CheckpointManager(store, tiers=[Tier(tmp_path / "fast")]) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
            manager._saves.settle()  # pyright: ignore[reportPrivateUsage]
            manager._promotions.wait()  # pyright: ignore[reportPrivateUsage]
        ((number, error),) = manager.failures
        assert (number, "full" in str(error)) == (2, True)
        assert manager.latest() == 2
        assert steps(tmp_path / "fast") == [2]
        assert steps(tmp_path / "root") == [1]
        if op != "publish":
            assert not list((tmp_path / "root").glob("step-2/data/*/*"))
        manager.save(3, state(3))
    assert value_of(tmp_path / "root" / "step-3") == 3
    assert steps(tmp_path / "root") == [1, 3]


def test_the_last_one_must_come_to_the_root(tmp_path: Path) -> None:
    rules = [Rule(RaiseError(StorageError(EIO, "full")), op="create", name="step-2/*")]
    for policy in ("raise", "warn"):
        store = FaultyStore(LocalStore(tmp_path / policy), rules)
        manager = CheckpointManager(
            store,
            tiers=[Tier(tmp_path / f"fast-{policy}")],
            on_failure=policy,
        )
        manager.save(1, state(1))
        manager.save(2, state(2))
        if policy == "raise":
            with pytest.raises(StorageError, match="full"):
                manager.close()
        else:
            manager.close()
        assert [step for step, _ in manager.failures] == [2]


def test_damage_in_the_tier_does_not_come_to_the_root(tmp_path: Path) -> None:
    fast, root = tmp_path / "fast", tmp_path / "root"
    gate = Gate()

    def plan(call: Call) -> Fault | None:
        return gate if call.op == "create" and call.name.startswith("step-1/data") else None

    manager = CheckpointManager(
        FaultyStore(LocalStore(root), plan), tiers=[Tier(fast)], on_failure="warn"
    )
    manager.save(1, state(1))
    assert gate.met.wait(30)
    manager.save(2, state(2))
    assert manager.saving is None or manager.saving.result()
    (path,) = fast.glob("step-2/data/*/*")
    damage(path)
    gate.opened.set()
    manager.close()
    ((number, error),) = manager.failures
    assert number == 2
    assert isinstance(error, Corrupt)
    assert f"{path}: bytes" in str(error)
    assert steps(root) == [1]
    with CheckpointManager(root, tiers=[Tier(fast)]) as manager:
        got = state(0)
        report = manager.restore(got)
        assert (got["step"], report.url) == (1, str(root / "step-1"))
        assert list(report.passed_over) == [str(fast / "step-2")]


def test_the_same_step_is_taken_from_the_root_where_the_tier_is_damaged(tmp_path: Path) -> None:
    fast, root = tmp_path / "fast", tmp_path / "root"
    with CheckpointManager(root, tiers=[Tier(fast)]) as manager:
        manager.save(1, state(1))
    (path,) = fast.glob("step-1/data/*/*")
    damage(path)
    with CheckpointManager(root, tiers=[Tier(fast)]) as manager:
        assert manager.restore(state(0)).url == str(root / "step-1")


@pytest.mark.parametrize("is_dead", [False, True], ids=["empty", "dead"])
def test_a_tier_that_is_lost_is_passed_over(tmp_path: Path, is_dead: bool) -> None:
    root = tmp_path / "root"
    with CheckpointManager(root, tiers=[Tier(tmp_path / "fast")]) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    dead = RaiseError(StorageError(EIO, "dead"))
    tier = FaultyStore(
        LocalStore(tmp_path / ("fast" if is_dead else "new")), [Rule(dead)] if is_dead else []
    )
    with CheckpointManager(root, tiers=[Tier(tier)]) as manager:
        got = state(0)
        report = manager.restore(got)
        assert (got["step"], report.url) == (2, str(root / "step-2"))
        assert list(report.passed_over) == ([tier.url] if is_dead else [])
        assert manager.latest() == 2
        assert 2 in manager.all_steps()
    broken = FaultyStore(LocalStore(root), [Rule(dead)])
    with (
        pytest.raises(StorageError, match="dead"),
        CheckpointManager(broken, tiers=[Tier(tmp_path / "fast")]) as manager,
    ):
        manager.restore(state(0))


def test_a_tier_that_dies_during_the_load_is_passed_over(tmp_path: Path) -> None:
    fast, root = tmp_path / "fast", tmp_path / "root"
    with CheckpointManager(root, tiers=[Tier(fast)]) as manager:
        manager.save(1, state(1))
    rule = Rule(RaiseError(StorageError(EIO, "agent died")), op="read_into")
    with CheckpointManager(root, tiers=[Tier(FaultyStore(LocalStore(fast), [rule]))]) as manager:
        report = manager.restore(state(0))
    assert report.url == str(root / "step-1")
    assert "agent died" in report.passed_over[str(fast / "step-1")]


def test_what_the_first_tier_does_not_take_is_brought_on_from_the_next(tmp_path: Path) -> None:
    full = RaiseError(StorageError(EIO, "full"))
    fast = FaultyStore(LocalStore(tmp_path / "fast"), [Rule(full, op="create", name="step-2/*")])
    tiers = [Tier(fast), Tier(tmp_path / "disk")]
    with CheckpointManager(tmp_path / "root", tiers=tiers) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), force=True)
        manager.wait()
        assert manager.failures == ()
    assert steps(tmp_path / "root") == [1, 2, 3]
    assert steps(tmp_path / "fast") == steps(tmp_path / "disk") == [3]
    assert dcp.verify(tmp_path / "root" / "step-2").problems == ()


def test_a_run_that_goes_back_replaces_later_steps_everywhere(tmp_path: Path) -> None:
    fast, root = tmp_path / "fast", tmp_path / "root"
    options: dict[str, Any] = {"tiers": [Tier(fast, keep=Keep(last=2))], "when": EverySteps(2)}
    with CheckpointManager(root, **options) as manager:
        for step in range(1, 9):
            manager.save(step, state(step), force=step % 2 == 0)
    with CheckpointManager(root, **options) as manager:
        manager.restore(state(0), step=4)
        manager.save(6, state(106), force=True)
        manager.wait()
        assert manager.all_steps() == (2, 4, 6)
    assert value_of(root / "step-6") == value_of(fast / "step-6") == 106
    with CheckpointManager(root, **options) as manager:
        got = state(0)
        manager.restore(got)
        assert got["step"] == 106
    manager = CheckpointManager(root, **options)
    with pytest.raises(AlreadyCommitted, match="up to step 6"):
        manager.save(6, state(6))
    manager.close()


def test_a_later_step_gives_way_in_a_tier_that_did_not_answer(tmp_path: Path) -> None:
    fast, disk, root = (tmp_path / name for name in ("fast", "disk", "root"))
    keep = Keep(last=3)
    with CheckpointManager(root, tiers=[Tier(fast, keep), Tier(disk, keep)]) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), force=True)

    def plan(call: Call) -> Fault | None:
        is_listed = call.op == "list" and not call.name
        is_marked = (disk / "step-2.abandoned").exists()
        return RaiseError(StorageError(EIO, "away")) if is_listed and is_marked else None

    tiers = [Tier(fast, keep), Tier(FaultyStore(LocalStore(disk), plan), keep)]
    with CheckpointManager(root, tiers=tiers) as manager:
        manager.restore(state(0), step=1)
        manager.save(2, state(102))
        manager.wait()
        assert manager.failures == ()
    assert [value_of(place / "step-2") for place in (fast, disk, root)] == [102] * 3
    assert not (disk / "step-2.abandoned").exists()


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("tiers", [0, 1])
def test_a_run_may_come_to_all_later_steps_again(
    tmp_path: Path, tiers: int, in_background: bool
) -> None:
    """Also the run after the one that went back, and one that goes back anew."""
    root, fast = tmp_path / "root", tmp_path / "fast"
    options: dict[str, Any] = {
        "tiers": [Tier(fast, keep=Keep(last=2))] * tiers,
        "in_background": in_background,
    }
    with CheckpointManager(root, **options) as manager:
        for step in range(1, 8):
            manager.save(step, state(step), force=True)
    for line in (100, 200):
        for begin, end in ((3, 6), (5, 8)):
            with CheckpointManager(root, **options) as manager:
                got = state(0)
                manager.restore(got, step=3 if begin == 3 else None)
                assert got["step"] == (3 if begin == 3 else line + 5)
                for step in range(begin + 1, end):
                    manager.save(step, state(line + step), force=True)
        with CheckpointManager(root, **options) as manager:
            assert manager.all_steps() == (1, 2, 3, 4, 5, 6, 7)
            manager.restore(got)
            assert got["step"] == line + 7
        kept = [value_of(root / f"step-{step}") for step in range(1, 8)]
        assert kept == [1, 2, 3, *(line + step for step in range(4, 8))]


def test_a_record_that_cannot_be_taken_away_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, no_dist=True) as manager:
        for step in (1, 2):
            manager.save(step, state(step))

    def body(rank: int, group: dist.ProcessGroup) -> str:
        store = FaultyStore(
            LocalStore(tmp_path),
            [Rule(RaiseError(StorageError("no")), op="delete", name="step-2*")],
        )
        with CheckpointManager(store, process_group=group) as manager:
            manager.restore(state(0), step=1)
            with pytest.raises(StorageError) as found:
                manager.save(2, state(102))
            return str(found.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert value_of(tmp_path / "step-2") == 2


def test_incremental_saves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not go with tiers"):
        CheckpointManager(tmp_path, tiers=[Tier(tmp_path / "fast")], incremental=2)


def test_what_a_signal_asks_for_comes_to_the_root(tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path / "root", when=(), tiers=[Tier(tmp_path / "fast")], on_signals=OnSignals()
    ) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        step = 0
        while not manager.stopping:
            step += 1
            manager.save(step, state(step))
            time.sleep(0.001)
        assert step in steps(tmp_path / "fast")
    assert value_of(tmp_path / "root" / f"step-{step}") == step


def test_a_stop_waits_for_the_first_tier_and_closing_for_the_root(tmp_path: Path) -> None:
    fast, root = tmp_path / "fast", tmp_path / "root"
    gate = Gate()
    store = FaultyStore(LocalStore(root), lambda call: gate if call.op == "create" else None)
    on_signals = OnSignals(emergency=Emergency(deadline=timedelta(seconds=20)))
    with CheckpointManager(store, when=(), tiers=[Tier(fast)], on_signals=on_signals) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(1, state(1))
        assert manager.stopping
        assert value_of(fast / "step-1") == 1
        assert gate.met.wait(30)
        assert steps(root) == []
        gate.opened.set()
    assert value_of(root / "step-1") == 1


def test_a_process_that_waits_for_nothing_ends_with_its_last_step_in_the_root(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, torch\n"
        "from dtckpt.checkpoint import CheckpointManager, Tier\n"
        "from dtckpt.storage import Delay, FaultyStore, LocalStore, Rule\n"
        "root = FaultyStore(LocalStore(sys.argv[1]), [Rule(Delay(0.5), op='create')])\n"
        "manager = CheckpointManager(root, tiers=[Tier(sys.argv[2])])\n"
        "manager.save(1, {'w': torch.ones(10)})\n"
    )
    root, fast = str(tmp_path / "root"), str(tmp_path / "fast")
    subprocess.run([sys.executable, "-c", code, root, fast], check=True, timeout=120)
    assert steps(tmp_path / "root") == [1]


def test_who_waits_for_the_upkeep_of_a_place_tells_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    wait = Worker.wait

    def noted(
        worker: Worker, tick: Callable[[], None] = lambda: None, within: float = math.inf
    ) -> bool:
        if threading.current_thread() is not threading.main_thread():
            told.append(tick.__name__ == "tell_alive")
        return wait(worker, tick, within)

    monkeypatch.setattr(Worker, "wait", noted)
    with CheckpointManager(tmp_path / "root", tiers=[Tier(tmp_path / "fast")]) as manager:
        manager.save(1, state(1))
    assert told == [True]
