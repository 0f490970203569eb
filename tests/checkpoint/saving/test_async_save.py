"""Saves in the background: the state of the call, one at a time, cancelled or brought to an end."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks import base as solo_ranks
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.ranks.together import ranks_of, together
from dtckpt.checkpoint.saving import handle as handles
from dtckpt.errors import (
    AlreadyCommitted,
    Busy,
    Cancelled,
    CheckpointError,
    RankFailed,
    StorageError,
    Timeout,
    Unsavable,
)
from dtckpt.storage import Fault, FaultyStore, LocalStore, MemoryStore, RaiseError, Rule, Store

from ...ranks import RanksFailed, run_ranks

SIZE = 3


class Gate(Fault):
    """Holds a storage call up until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def before(self) -> None:
        self.reached.set()
        assert self.opened.wait(30)


def state(value: float = 1.0) -> dict[str, Any]:
    return {f"t{i}": torch.full((50,), value) for i in range(2 * SIZE)} | {"step": value}


def gated(store: Store, gate: Gate, op: str = "create") -> FaultyStore:
    return FaultyStore(store, [Rule(gate, op=op, nth=1)])


def value_of(store: Store) -> float:
    with dcp.open(store) as checkpoint:
        values = {float(v) for t in checkpoint.values() for v in t[...].unique()}
    assert len(values) == 1
    return values.pop()


def test_the_state_at_the_call_is_saved() -> None:
    store, gate = MemoryStore(), Gate()
    live = state(1.0)
    handle = dcp.async_save(live, gated(store, gate))
    for tensor in live.values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(7.0)
    live["step"] = 7.0
    assert gate.reached.wait(10)
    assert not handle.done()
    assert not store.exists("manifest.json")
    with pytest.raises(Timeout, match="goes on"):
        handle.result(0.05)
    gate.opened.set()
    report = handle.result(30)
    assert handle.done()
    assert handle.exception() is None
    assert value_of(store) == 1.0
    assert dcp.open(store).state_dict()["step"] == 1.0
    progress = handle.progress()
    assert progress.written_bytes == progress.total_bytes == report.total_bytes == 1200


def test_no_bytes_but_those_of_the_view_are_staged() -> None:
    big = torch.arange(1000.0)
    tensors = {"view": big[10:20], "strided": big.view(20, 50)[:, 3], "empty": big[:0]}
    store = MemoryStore()
    assert dcp.async_save(tensors, store).result(30).total_bytes == 30 * 4
    with dcp.open(store) as checkpoint:
        assert torch.equal(checkpoint["view"][...], big[10:20])
        assert torch.equal(checkpoint["strided"][...], big.view(20, 50)[:, 3])
        assert checkpoint["empty"][...].shape == (0,)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64],
)
def test_every_dtype_is_staged(dtype: torch.dtype) -> None:
    store = MemoryStore()
    value = torch.arange(24).remainder(2).to(dtype).view(4, 6).t()
    scalar = torch.ones((), dtype=dtype)
    dcp.async_save({"x": value, "s": scalar}, store).result(30)
    with dcp.open(store) as checkpoint:
        assert torch.equal(
            checkpoint["x"][...].view(torch.uint8), value.contiguous().view(torch.uint8)
        )
        assert checkpoint["s"][...].dtype == dtype


def test_ranks_save_in_the_background_without_the_group() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> dcp.SaveReport:
        calls: list[str] = []

        class NoCollectives:
            """Stands before the group and notes what is called."""

            def __getattr__(self, name: str) -> Any:
                calls.append(name)
                return getattr(group, name)

        guarded = NoCollectives()
        together(ranks_of(guarded), "meeting", bytes)  # the only use of the group
        calls.clear()
        handle = dcp.async_save(state(), store, process_group=guarded)
        report = handle.result(30)
        assert set(calls) <= {"rank"}, "nothing but the number of this rank"
        return report

    reports = run_ranks(SIZE, body)
    assert {r.save_id for r in reports} == {reports[0].save_id}
    assert value_of(store) == 1.0


def test_the_memory_for_copies_is_used_again() -> None:
    def body(rank: int, group: Any) -> bool:
        memory = members_of(group).memory
        dcp.async_save(state(1.0), store.substore("a"), process_group=group).result(30)
        first = memory["staging"]._free._arena
        dcp.async_save(state(2.0), store.substore("b"), process_group=group).result(30)
        return memory["staging"]._free._arena is first

    store = MemoryStore()
    assert run_ranks(2, body) == [True, True]
    assert [value_of(store.substore(name)) for name in "ab"] == [1.0, 2.0]


def test_the_next_save_waits_for_the_one_before() -> None:
    store, gate = MemoryStore(), Gate()
    first = dcp.async_save(state(1.0), gated(store.substore("a"), gate))
    threading.Timer(0.2, gate.opened.set).start()
    second = dcp.async_save(state(2.0), store.substore("b"))
    assert first.done()
    second.result(30)
    assert [value_of(store.substore(name)) for name in "ab"] == [1.0, 2.0]


def test_a_save_that_does_not_return_before_its_end_waits_too() -> None:
    store, gate = MemoryStore(), Gate()
    first = dcp.async_save(state(1.0), gated(store.substore("a"), gate))
    threading.Timer(0.2, gate.opened.set).start()
    dcp.save(state(2.0), store.substore("b"))
    assert first.done()


def test_the_next_save_may_be_refused_on_all_ranks() -> None:
    store, gate = MemoryStore(), Gate()

    def body(rank: int, group: Any) -> None:
        mine = gated(store.substore("a"), gate) if rank == 1 else store.substore("a")
        first = dcp.async_save(state(1.0), mine, process_group=group)
        try:
            with pytest.raises(Busy, match="still under way"):
                dcp.async_save(
                    state(2.0), store.substore("b"), process_group=group, if_busy="refuse"
                )
        finally:
            gate.opened.set()
        first.result(30)

    run_ranks(SIZE, body)
    assert value_of(store.substore("a")) == 1.0
    assert not store.exists("b/manifest.json")


def test_the_next_save_may_supersede_the_one_before() -> None:
    store, gate = MemoryStore(), Gate()

    def body(rank: int, group: Any) -> None:
        mine = gated(store.substore("a"), gate) if rank == 1 else store.substore("a")
        first = dcp.async_save(state(1.0), mine, process_group=group)
        if rank == 1:
            assert gate.reached.wait(10)
            threading.Timer(0.1, gate.opened.set).start()
        second = dcp.async_save(
            state(2.0), store.substore("b"), process_group=group, if_busy="supersede"
        )
        second.result(30)
        assert isinstance(first.exception(), Cancelled)

    run_ranks(SIZE, body)
    assert value_of(store.substore("b")) == 2.0
    assert list(store.list("a")) == [], "nothing is left of the cancelled one"


def test_one_rank_cancels_for_all() -> None:
    store, gate = MemoryStore(), Gate()

    def body(rank: int, group: Any) -> None:
        mine = gated(store, gate) if rank == 2 else store
        handle = dcp.async_save(state(), mine, process_group=group)
        if rank == 2:
            assert gate.reached.wait(10)
            handle.cancel()
            gate.opened.set()
        with pytest.raises(Cancelled, match="failed on rank 2"):
            handle.result(30)

    run_ranks(SIZE, body)
    assert list(store.list()) == []
    dcp.save(state(), store)


@pytest.mark.parametrize("op", ["write", "close"])
def test_a_save_that_is_cancelled_late_is_not_committed(op: str) -> None:
    """Nor goes it on writing; all of it may have been written, too."""
    store, gate = MemoryStore(), Gate()
    writes = gated(store, gate, op)
    large = {f"t{i}": torch.ones(1 << 17) for i in range(20)}
    handle = dcp.async_save(large, writes)
    assert gate.reached.wait(30)
    handle.cancel()
    gate.opened.set()
    assert isinstance(handle.exception(30), Cancelled)
    assert list(store.list()) == []
    if op == "write":
        assert sum(call.op == "write" for call in writes.calls) <= 2


def test_a_save_that_gets_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: a deadline begins anew with every piece."""
    store, gate, hours = MemoryStore(), Gate(), itertools.count()
    first = dcp.async_save(state(), gated(store, gate))
    assert gate.reached.wait(30)
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    for module in (handles, solo_ranks):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(handles, "_WAIT_SECONDS", 0.001)
    moves: list[int] = []

    def on_wait() -> None:
        moves.append(1)
        vars(first)["_job"].ranks.tell_alive()
        if len(moves) == 20:
            gate.opened.set()

    assert first.make_way(timedelta(hours=5), on_wait)
    assert len(moves) >= 20


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_that_waits_for_a_slower_rank_is_waited_for(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the timeout of whoever waits: the save gives up ranks that do not get on itself."""
    monkeypatch.setattr(handles, "_WAIT_SECONDS", 0.01)
    store, gate, met = MemoryStore(), Gate(), threading.Barrier(2)
    looks: list[int] = []

    def body(rank: int, group: Any) -> bool:
        mine = gated(store, gate) if rank == slow else store
        handle = dcp.async_save(state(), mine, process_group=group)
        assert gate.reached.wait(30)
        ranks: Any = vars(handle)["_job"].ranks

        def on_wait() -> None:
            looks.append(1)
            if len(looks) == 30:
                gate.opened.set()

        if rank == slow:
            met.wait(60)
            return True
        limit = time.monotonic() + 30
        while not ranks._waits:  # it has written its own part
            assert time.monotonic() < limit
            time.sleep(0.001)
        found = handle.make_way(timedelta(milliseconds=50), on_wait)
        met.wait(60)
        return found

    assert run_ranks(2, body) == [True, True]
    assert dcp.verify(store).problems == ()


def test_errors_of_planning_are_raised_at_once_and_alike() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        dcp.async_save({"x": object() if rank == 1 else 0}, store, process_group=group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, body)
    assert {type(error) for error in failure.value.errors.values()} == {Unsavable}
    dcp.save(state(), store)
    with pytest.raises(AlreadyCommitted):
        dcp.async_save(state(), store)


@pytest.mark.parametrize("op", ["create", "write", "close"])
def test_errors_of_writing_are_told_by_every_handle(op: str) -> None:
    store = MemoryStore()
    broken = Rule(RaiseError(StorageError("disk on fire")), op=op)

    def body(rank: int, group: Any) -> str:
        mine = FaultyStore(store, [broken] if rank == 1 else [])
        handle = dcp.async_save(state(), mine, process_group=group)
        error = handle.exception(30)
        assert isinstance(error, StorageError)
        with pytest.raises(StorageError, match="disk on fire"):
            handle.result()
        return str(error)

    texts = run_ranks(SIZE, body)
    assert len(set(texts)) == 1
    assert "save: write failed on rank 1" in texts[0]
    assert list(store.list()) == []


def test_a_failure_that_nobody_asks_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    broken = FaultyStore(
        MemoryStore(), [Rule(RaiseError(StorageError("disk on fire")), op="create")]
    )
    dcp.async_save(state(), broken)
    with caplog.at_level(logging.ERROR, logger="dtckpt.checkpoint"):
        dcp.save(state(), MemoryStore())
    assert "disk on fire" in caplog.text


def test_a_silent_rank_is_named_by_the_others() -> None:
    store, gate = MemoryStore(), Gate()
    heard = threading.Barrier(SIZE)

    def body(rank: int, group: Any) -> str:
        mine = gated(store, gate) if rank == 1 else store
        handle = dcp.async_save(
            state(), mine, process_group=group, timeout=timedelta(milliseconds=600)
        )
        error = None if rank == 1 else handle.exception(30)
        heard.wait(30)
        gate.opened.set()
        return str(error or handle.exception(30))

    texts = run_ranks(SIZE, body)
    assert "rank 1 is lost: it lives, but has not got on within 0.6 s: save: write" in texts[1]
    assert texts[0] == texts[2]
    assert texts[0].startswith(f"{texts[1]}. No other rank can write the part of rank 1: ")
    assert not store.exists("manifest.json")


def test_callbacks_are_called_at_the_end() -> None:
    ended = threading.Event()
    handle = dcp.async_save(state(), MemoryStore())
    handle.add_done_callback(lambda done: done is handle and ended.set())
    assert ended.wait(30)


def test_a_wrong_choice_is_refused() -> None:
    wrong: Any = "perhaps"
    with pytest.raises(CheckpointError, match="if_busy"):
        dcp.async_save(state(), MemoryStore(), if_busy=wrong)


def test_local_disk(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    big = {f"t{i}": torch.randn(300_000) for i in range(40)}
    dcp.async_save(big, store).result(60)
    assert dcp.verify(store).problems == ()
    with dcp.open(store) as checkpoint:
        assert all(torch.equal(checkpoint[name][...], value) for name, value in big.items())


def test_a_lost_coordinator_is_named() -> None:
    def body(rank: int, group: Any) -> None:
        members = members_of(group)
        if rank == 0:
            members.wire.close()
            return
        with pytest.raises(RankFailed, match="rank 0, which coordinates ranks 0-1, "):
            dcp.save(state(), MemoryStore(), process_group=group)

    run_ranks(2, body)
