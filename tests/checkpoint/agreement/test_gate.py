"""Calls are counted, held and let go; none is lost and none waits for ever."""

from __future__ import annotations

import threading
import time

import pytest

from dtckpt.checkpoint.agreement.gate import Agreed, CallGate
from dtckpt.errors import RankFailed
from tests.waiting import wait_for


def test_the_agreed_call_is_the_one_that_tells() -> None:
    gate = CallGate(10.0)
    assert gate.enter() is None
    assert gate.hold() == 1
    gate.let_go(3, Agreed(("SIGTERM",)))
    assert [gate.enter() for _ in range(4)] == [None, None, Agreed(("SIGTERM",)), None]


def test_a_held_call_waits_until_it_is_let_go() -> None:
    gate = CallGate(60.0)
    assert gate.enter() is None
    assert gate.enter() is None
    assert gate.hold() == 2
    gate.thread = 0
    found: list[Agreed | None] = []
    thread = threading.Thread(target=lambda: found.append(gate.enter()), daemon=True)
    thread.start()
    wait_for(lambda: gate.thread == thread.ident)
    assert not found
    gate.let_go(2, Agreed(("asked",)))
    thread.join(20)
    assert found == [Agreed(("asked",))]


def test_nobody_is_held_longer_than_the_patience() -> None:
    gate = CallGate(0.05)
    gate.hold()
    with pytest.raises(RankFailed, match="does not answer"):
        gate.enter()
    assert gate.enter() is None
    gate.let_go(0, Agreed(("late",)))  # the others save at a call that is over here
    with pytest.raises(RankFailed, match=r"agreed to save \(late\)"):
        gate.enter()
    assert gate.enter() is None


def test_two_decisions_for_one_call_are_one() -> None:
    gate = CallGate(10.0)
    limit = time.monotonic() + 60
    gate.let_go(0, Agreed(("a", "b")))
    gate.hold()
    gate.let_go(0, Agreed(("b", "c"), limit))
    assert gate.is_due("a")
    assert gate.enter() == Agreed(("a", "b", "c"), limit)
    assert not gate.is_due("a")


def test_a_failure_does_not_hide_that_the_others_save() -> None:
    gate = CallGate(10.0)
    gate.let_go(0, Agreed(("first",)))
    gate.fail(RankFailed("the second turn"))
    assert gate.enter() == Agreed(("first",))
    with pytest.raises(RankFailed, match="the second turn"):
        gate.enter()
    assert gate.enter() is None


def test_a_hold_never_misses_a_call_that_is_on_its_way() -> None:
    gate = CallGate(60.0)
    saved: list[int] = []
    ends = threading.Event()

    def train() -> None:
        number = 0
        while not ends.is_set() or len(saved) < 200:
            if gate.enter() is not None:
                saved.append(number)
            number += 1

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    agreed: list[int] = []
    for turn in range(200):
        agreed.append(gate.hold() + turn % 3)
        gate.let_go(agreed[-1], Agreed((str(turn),)))
        wait_for(lambda: not gate.is_due(str(turn)))  # noqa: B023
    ends.set()
    thread.join(20)
    assert saved == agreed
