"""``CheckpointManager`` where signals and other processes ask for saves."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import CheckpointManager, Emergency, OnSignals, request_save
from dtckpt.checkpoint.manager.demand import SAVE_NOW
from dtckpt.errors import CheckpointError
from dtckpt.storage import Delay, FaultyStore, LocalStore, RaiseError, Rule, StorageError

from ...ranks import run_ranks
from ...waiting import wait_for
from .test_manager_ranks import state as sharded

OFTEN = timedelta(seconds=0.05)


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((64,), value), "step": value}


def test_a_signal_to_save_saves_the_next_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, when=(), on_signals=OnSignals()) as manager:
        assert not manager.save(1, state(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.save(2, state(2))
        assert not manager.stopping
        assert not manager.save(3, state(3))
    assert dcp.committed_steps(tmp_path)[0].number == 2


def test_a_signal_to_stop_saves_and_says_so(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with CheckpointManager(tmp_path, when=(), on_signals=OnSignals()) as manager:
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.save(5, state(5))
            assert manager.stopping
            # It is durable already.
            assert [step.number for step in dcp.committed_steps(tmp_path)] == [5]
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is not before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_save_that_takes_too_long_is_called_off(tmp_path: Path) -> None:
    slow = FaultyStore(LocalStore(tmp_path), [Rule(Delay(1.5), op="close", name="step-2/*")])
    emergency = Emergency(deadline=timedelta(seconds=0.4))
    with CheckpointManager(
        slow, when=(), on_signals=OnSignals(emergency=emergency), on_failure="warn"
    ) as manager:
        manager.save(1, state(1), force=True)
        manager.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        assert not manager.save(2, state(2))
        assert time.monotonic() - began < 1.4
        assert manager.stopping
        ((step, error),) = manager.failures
        assert step == 2
        assert "called off" in str(error)
    time.sleep(1.5)
    found = dcp.latest(tmp_path)
    assert found is not None
    assert found.number == 1


def test_an_earlier_failure_does_not_keep_the_last_save_from_being_made(tmp_path: Path) -> None:
    rule = Rule(RaiseError(StorageError("503")), op="create", nth=1)
    store = FaultyStore(LocalStore(tmp_path), [rule])
    with CheckpointManager(store, when=(), on_signals=OnSignals()) as manager:
        manager.save(1, state(1), force=True)
        while manager.saving:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(2, state(2))
        assert [step for step, _ in manager.failures] == [1]
    assert [step.number for step in dcp.committed_steps(tmp_path)] == [2]


def test_a_stop_takes_the_place_of_a_save_that_has_written_nothing(tmp_path: Path) -> None:
    slow = FaultyStore(LocalStore(tmp_path), [Rule(Delay(1.0), op="create", name="step-1/*")])
    with CheckpointManager(slow, when=(), on_signals=OnSignals()) as manager:
        manager.save(1, state(1), force=True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(2, state(2))
    assert [step.number for step in dcp.committed_steps(tmp_path)] == [2]


def ask_meanwhile(root: Path, manager: CheckpointManager, give: Any) -> str | None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(request_save, root, wait=timedelta(seconds=60))
        for step in range(1, 100_000):
            manager.save(step, lambda: give(step))  # noqa: B023
            if manager.saving is None and answer.done():
                break
            threading.Event().wait(0.01)
        return answer.result()


def test_another_process_asks_and_is_answered(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, when=(), on_demand=OFTEN) as manager:
        url = ask_meanwhile(tmp_path, manager, state)
    (step,) = dcp.committed_steps(tmp_path)
    assert url == step.url


def test_who_asks_is_told_of_a_failure(tmp_path: Path) -> None:
    store = FaultyStore(
        LocalStore(tmp_path), [Rule(RaiseError(StorageError("disk full")), op="create")]
    )
    with (
        CheckpointManager(store, when=(), on_demand=OFTEN, on_failure="warn") as manager,
        pytest.raises(CheckpointError, match=r"the save failed: .*disk full"),
    ):
        ask_meanwhile(tmp_path, manager, state)


def test_who_asks_is_told_why_a_save_was_called_off(tmp_path: Path) -> None:
    slow = FaultyStore(LocalStore(tmp_path), [Rule(Delay(1.5), op="close", name="step-1/*")])
    on_signals = OnSignals(emergency=Emergency(deadline=timedelta(seconds=0.4)))
    with (
        ThreadPoolExecutor(1) as pool,
        CheckpointManager(
            slow, when=(), on_signals=on_signals, on_demand=OFTEN, on_failure="warn"
        ) as manager,
    ):
        answer = pool.submit(request_save, tmp_path, wait=timedelta(seconds=60))
        wait_for(lambda: (tmp_path / SAVE_NOW).exists())
        num_calls = len(slow.calls)
        wait_for(lambda: len(slow.calls) >= num_calls + 3)  # one look is over, whatever it saw
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.save(1, state(1))
        with pytest.raises(CheckpointError, match="called off"):
            answer.result()


def test_all_ranks_save_what_one_was_asked_for(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        saved: list[int] = []
        with CheckpointManager(tmp_path, when=(), on_demand=OFTEN, process_group=group) as manager:
            if rank == 0:
                request_save(tmp_path)
            for step in range(1, 20_000):
                if manager.save(step, lambda: sharded(group, rank, step)):  # noqa: B023
                    saved.append(step)
                    break
                threading.Event().wait(0.002)
        return saved

    first, second = run_ranks(2, body)
    assert first == second
    assert len(first) == 1
