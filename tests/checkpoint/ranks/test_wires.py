"""Connections between ranks: what breaks in a call fails that call, on all ranks, and no other."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.errors import CheckpointError, RankFailed
from dtckpt.storage import Fault, FaultyStore, MemoryStore, Rule

from ...ranks import RanksFailed, run_ranks
from ...waiting import beside_each_other
from .proxy import Network

SIZE = 3
SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=20)
MOST_SECONDS = 25.0
"""Far more than the timeout and a few seconds on a busy machine, far less than the next limit."""


class Do(Fault):
    """Calls something before the effect."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def before(self) -> None:
        self.call()


class Component:
    """Calls something when it is asked for its state, or given it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {"x": 1}

    def load_state_dict(self, _: object) -> None:
        self.call()


def state(value: float = 1.0) -> dict[str, Any]:
    return {f"t{i}": torch.full((50,), value) for i in range(2 * SIZE)}


def intact(store: Any) -> bool:
    return dcp.verify(store).problems == ()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    made = Network(monkeypatch)
    yield made
    made.close()


def failures(body: Callable[[int, Any], Any], size: int = SIZE) -> dict[int, BaseException]:
    """Run ranks of which some must raise, and return their errors."""
    with pytest.raises(RanksFailed) as failure:
        run_ranks(size, body)
    return failure.value.errors


PHASES = ("state_dict", "create", "write", "close", "publish")


@pytest.mark.parametrize("at", PHASES)
@pytest.mark.parametrize("broken", ["reset", "deaf"])
def test_what_breaks_in_a_save_fails_that_save_only(network: Network, at: str, broken: str) -> None:
    """All members lose the coordinator in the middle of the second of three saves."""
    store = MemoryStore()
    gate = threading.Barrier(SIZE)
    answered_before = 0

    def break_it() -> None:
        # A member that connects only afterwards would meet a network that is whole.
        network.wait_until_answered(answered_before + SIZE - 1)
        if broken == "reset":
            network.reset()
        else:
            network.is_deaf = True

    def body(rank: int, group: Any) -> str:
        nonlocal answered_before
        dcp.save(state(1.0), store.substore("1"), process_group=group)
        breaks = rank == 0
        if breaks:
            answered_before = network.num_answered
        gate.wait(60)
        second: Any = store.substore("2")
        if breaks and at != "state_dict":
            second = FaultyStore(second, [Rule(Do(break_it), op=at, nth=1)])
        value: dict[str, Any] = state(2.0)

        def at_state_dict() -> None:
            gate.wait(60)  # all have come
            if breaks and at == "state_dict":
                break_it()

        value["c"] = Component(at_state_dict)
        text = ""
        try:
            # Only silence is waited for; nobody who is slow is given up in the other cases.
            timeout = SHORT if broken == "deaf" else LONG
            dcp.save(value, second, process_group=group, timeout=timeout)
        except RankFailed as error:
            text = str(error)
        gate.wait(60)
        network.is_deaf = False
        dcp.save(state(3.0), store.substore("3"), process_group=group)
        return text

    began = time.monotonic()
    texts = run_ranks(SIZE, body)
    assert time.monotonic() - began < MOST_SECONDS
    if at == "state_dict" and texts[0]:  # else all had answered before
        assert re.search(r"failed: rank [12] is lost: ", texts[0])
    else:  # the coordinator holds all that is to be written, and waits for nobody
        assert texts[0] == ""
        assert intact(store.substore("2"))
    for text in texts[1:]:
        assert re.search(r"rank 0, which coordinates ranks 0-2, is lost: |rank [12] is lost", text)
    for number, value in ((1, 1.0), (3, 3.0)):
        into = state(0.0)
        dcp.load(into, store.substore(str(number)))
        assert into["t0"][0] == value


@pytest.mark.parametrize("at", ["read_into", "load_state_dict"])
def test_a_reset_in_a_load_fails_that_load_only(network: Network, at: str) -> None:
    store = MemoryStore()
    dcp.save(state() | {"c": Component(lambda: None)}, store)

    def body(rank: int, group: Any) -> str:
        reset = network.reset if rank == 1 else lambda: None
        into: Any = state(0.0) | {"c": Component(lambda: None)}
        mine: Any = store
        if at == "load_state_dict":
            into["c"] = Component(reset)
        else:
            mine = FaultyStore(store, [Rule(Do(reset), op=at, nth=1)])
        with pytest.raises(RankFailed) as failure:
            dcp.load(into, mine, process_group=group, timeout=LONG)
        into = state(0.0) | {"c": Component(lambda: None)}
        dcp.load(into, store, process_group=group)
        assert into["t0"][0] == 1.0
        return str(failure.value)

    for text in run_ranks(2, body):
        assert re.search(r"rank 1 is lost|rank 0, which coordinates ranks 0-1, is lost", text)


def test_between_two_calls_nothing_is_held(network: Network) -> None:
    """So nothing can be broken: not by a reset, not by a router that forgets."""
    store = MemoryStore()
    gate = threading.Barrier(2)

    def body(rank: int, group: Any) -> None:
        for number in range(3):
            dcp.save(state(), store.substore(str(number)), process_group=group)
            gate.wait(30)
            if rank == 0:
                network.reset()
            gate.wait(30)
        dcp.async_save(state(), store.substore("async"), process_group=group).result(30)
        gate.wait(30)
        if rank == 0:
            network.reset()
        gate.wait(30)
        dcp.load(state(), store.substore("async"), process_group=group)

    run_ranks(2, body)
    assert network.num_connections == 6, "one each, and one to find the coordinator"


def test_many_calls_leave_no_descriptor_and_no_thread() -> None:
    store = MemoryStore()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def settled(limit: tuple[int, int]) -> tuple[int, int]:
        end = time.monotonic() + 20
        while any(a > b for a, b in zip(held(), limit, strict=True)) and time.monotonic() < end:
            time.sleep(0.02)
        return held()

    gate = threading.Barrier(2)

    def body(rank: int, group: Any) -> tuple[int, int] | None:
        after_first: tuple[int, int] | None = None
        for number in range(30):
            dcp.save(state(), store.substore(str(number)), process_group=group)
            gate.wait(30)
            if number == 0 and rank == 0:
                time.sleep(0.2)  # both ends have closed
                after_first = held()
            gate.wait(30)
        if after_first is None:
            return None
        found = settled(after_first)
        assert all(now <= first for now, first in zip(found, after_first, strict=True))
        return found

    run_ranks(2, body)


def test_a_rank_that_does_not_get_on_is_given_up_after_the_timeout() -> None:
    """It lives and shows it, but its storage hangs, or what it is asked for its state."""

    def check(victim: int, at: str) -> None:
        store, opened = MemoryStore(), threading.Event()
        waited: dict[int, float] = {}

        def body(rank: int, group: Any) -> str:
            dcp.save(state(), store.substore("1"), process_group=group)
            hangs = rank == victim
            mine: Any = store.substore("2")
            if hangs and at != "state_dict":
                mine = FaultyStore(mine, [Rule(Do(lambda: opened.wait(60)), op=at, nth=1)])
            value: dict[str, Any] = state()
            hang = hangs and at == "state_dict"
            value["c"] = Component((lambda: opened.wait(60)) if hang else (lambda: None))
            began = time.monotonic()
            try:
                dcp.save(value, mine, process_group=group, timeout=timedelta(seconds=3))
            except RankFailed as error:
                return str(error)
            finally:
                waited[rank] = time.monotonic() - began
                opened.set()
            return ""

        texts = run_ranks(2, body)
        assert texts[victim]
        other = texts[1 - victim]
        if victim == 1 and at != "state_dict":  # the other one has written its part
            assert other == ""
            assert intact(store.substore("2"))
            other = texts[victim]
        assert f"rank {victim}" in other
        assert "it lives, but has not got on within" in other
        place = "Component.state_dict" if at == "state_dict" else "save: write, in "
        assert place in other or "test_wires" in other
        # Seven times the timeout is what it was.
        assert waited[1 - victim] < 3 + 2 + 10

    cases = product((0, 1), ("state_dict", "create", "close"))
    beside_each_other(check, [*cases, (0, "stat")])


def test_a_rank_that_does_not_come_is_named(network: Network) -> None:
    gate = threading.Barrier(2)

    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        dcp.save(state(), store, process_group=group)
        if rank == 0:
            with pytest.raises(RankFailed, match=r"rank 1 is lost: .* has not come to this load"):
                dcp.load(state(), store, process_group=group, timeout=SHORT)
        gate.wait(60)

    run_ranks(2, body)


def test_a_failure_is_told_to_ranks_that_come_to_it_later() -> None:
    """The coordinator does not wait for them; they need not wait for it."""
    store, failed = MemoryStore(), threading.Event()

    def body(rank: int, group: Any) -> None:
        if rank == 1:
            failed.wait(60)
        try:
            target: Any = object() if rank == 0 else store
            dcp.save(state(), target, process_group=group)
        finally:
            failed.set()

    began = time.monotonic()
    errors = failures(body, 2)
    assert time.monotonic() - began < 9.0  # below what a member waits that has made a call less
    assert {type(error) for error in errors.values()} == {CheckpointError}
    assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"timeout": 5}, "timeout is a datetime.timedelta above zero, got 5"),
        ({"timeout": timedelta(0)}, "timeout is a datetime.timedelta above zero"),
        ({"storage_options": 5}, "TypeError"),
        ({"at_exit": "never"}, "at_exit is 'wait' or 'abort'"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(
    victim: int, wrong: dict[str, Any], named: str
) -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    call: Any = dcp.async_save if "at_exit" in wrong else dcp.load

    def body(rank: int, group: Any) -> None:
        target: Any = "memory-or-not" if "storage_options" in wrong else store
        call(state(), target, process_group=group, **(wrong if rank == victim else {}))

    errors = failures(body, 2)
    assert {type(error) for error in errors.values()} <= {CheckpointError}
    assert named in str(errors[1 - victim])
    assert f"failed on rank {victim}" in str(errors[1 - victim]) or "ranks 0-1" in str(errors[0])


def test_the_coordinator_is_missed_at_once_when_it_is_gone() -> None:
    store, gate = MemoryStore(), threading.Barrier(2)

    def body(rank: int, group: Any) -> None:
        dcp.save(state(), store, process_group=group)
        gate.wait(30)
        if rank == 0:
            members_of(group).wire.close()
            gate.wait(30)
            return
        gate.wait(30)
        with pytest.raises(RankFailed, match="rank 0, which coordinates ranks 0-1, is lost: "):
            dcp.save(state(), MemoryStore(), process_group=group)

    began = time.monotonic()
    run_ranks(2, body)
    assert time.monotonic() - began < MOST_SECONDS
