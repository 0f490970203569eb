"""What is told over wires, who is lost and when, and what is left when a call ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dtckpt.checkpoint.ranks import loop as loop_module
from dtckpt.checkpoint.ranks.call import Signs
from dtckpt.checkpoint.ranks.frames import END, MESSAGE, SIGN, end, message, sign
from dtckpt.checkpoint.ranks.greeting import Hello
from dtckpt.checkpoint.ranks.wire import Wire

from ...waiting import wait_for
from .wire_ends import QUIET, SECONDS, Clock, Ends, keep, on_wait


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# What comes is told at once to those who wait for it.


def test_a_message_ends_the_wait_for_it(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    member = ends.come(wire, 1, 0)
    on_wait(wire, monkeypatch, lambda: member.send(message(0, b"here")))
    assert wire.collect(0, 0, [1], 1e5) == ({1: b"here"}, {})


def test_so_does_the_end_of_a_connection(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    member = ends.come(wire, 1, 0)
    on_wait(wire, monkeypatch, member.socket.close)
    assert wire.collect(0, 0, [1], 1e5)[1].keys() == {1}


def test_so_does_a_member_that_comes_to_another_call(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    on_wait(wire, monkeypatch, lambda: ends.come(wire, 1, 1))
    assert "it was at call 1 " in wire.collect(0, 0, [1], 1e5)[1][1]


def test_so_does_the_end_of_the_wire(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = ends.wire(1, 2)
    wire.begin_call(0, "save", QUIET)
    on_wait(wire, monkeypatch, wire.close)
    assert wire.collect(0, 0, [1, 2], 1e5)[1].keys() == {1, 2}


def test_a_wait_ends_when_what_came_is_enough(ends: Ends) -> None:
    wire = ends.wire(1, 2)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 0, message(0, b"enough"))
    assert wire.collect(0, 0, [1, 2], 60.0, bool) == ({1: b"enough"}, {})


def test_only_the_first_message_of_a_round_counts(ends: Ends) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 0, message(0, b"one"), message(0, b"other"), message(1, b"next"))
    assert wire.collect(0, 1, [1], 60.0) == ({1: b"next"}, {})
    assert wire.arrived(0, 0) == {1: b"one"}
    wire.end_call(0, "")
    assert wire.arrived(0, 0) == {}


# Who is lost, when and why.


@pytest.mark.parametrize(("purpose", "what"), [("load", "this load. "), ("", "this call. ")])
def test_who_does_not_come_is_lost_after_the_timeout(
    ends: Ends, clock: Clock, purpose: str, what: str
) -> None:
    wire = ends.wire(1)
    clock.moves_in(wire)
    wire.begin_call(0, purpose, QUIET)
    answers, lost = wire.collect(0, 0, [1], 10.0)
    assert answers == {}
    assert f"it has not come to {what}" in lost[1]
    assert clock.now == pytest.approx(1010.0, abs=1e-6)


@pytest.mark.parametrize(
    ("age", "until", "why"),
    [
        (0.0, 1015.0, "; it was last heard of at save: write"),
        (3.0, 1012.0, "; it was last heard of at save: write"),
        (5.0, 1010.0, "; it was last heard of at save: write"),
        (None, 1010.0, ""),
    ],
)
def test_a_rank_is_lost_a_timeout_after_it_has_got_on(
    ends: Ends, clock: Clock, age: float | None, until: float, why: str
) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 0)

    def look() -> None:
        if clock.now == 1005.0 and age is not None:
            keep(wire, 1, sign(age, "save: write"))

    clock.moves_in(wire, look)
    _, lost = wire.collect(0, 0, [1], 10.0)
    assert lost == {1: f"it showed no sign of life within 10 s{why}"}
    assert clock.now == pytest.approx(until, abs=1e-6)


@pytest.mark.parametrize(
    ("told", "doing"), [("save: write", "save: write"), ("", "it does not say")]
)
def test_a_rank_that_lives_but_does_not_get_on_is_lost(
    ends: Ends, clock: Clock, told: str, doing: str
) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 0)
    clock.moves_in(wire, lambda: keep(wire, 1, sign(clock.now - 1000.0, told)))
    _, lost = wire.collect(0, 0, [1], 10.0)
    assert lost == {1: f"it lives, but has not got on within 10 s: {doing}"}
    assert clock.now == pytest.approx(1010.0, abs=1e-6)


def test_a_process_that_was_stopped_itself_does_not_blame_others(ends: Ends, clock: Clock) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 0)

    def look() -> None:
        if len(waits) == 3:
            clock.now += 3600.0  # SIGSTOP, or a laptop that was closed
        elif len(waits) == 8:
            keep(wire, 1, message(0, b"here"))

    waits = clock.moves_in(wire, look)
    assert wire.collect(0, 0, [1], 10.0) == ({1: b"here"}, {})


def test_nor_does_one_that_gets_the_processor_late_each_time(ends: Ends, clock: Clock) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)

    def late() -> None:
        clock.now += 0.5

    waits = clock.moves_in(wire, late)
    wire.collect(0, 0, [1], 10.0)
    assert sum(waits) == pytest.approx(10.0)


@pytest.mark.parametrize(("reason", "why"), [("", "it has ended this save or load"), ("x", "x")])
def test_a_rank_that_leaves_is_lost_with_its_reason(ends: Ends, reason: str, why: str) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 0).send(end(reason))
    assert wire.collect(0, 0, [1], 60.0) == ({}, {1: why})


def test_a_member_that_left_before_it_was_sent_to_is_heard(ends: Ends) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    member = ends.come(wire, 1, 0, message(0, b"answer"), end("no space"))
    member.socket.close()
    wire.send([1], 0, 0, bytes(1 << 16))
    assert wire.collect(0, 0, [1], 60.0) == ({1: b"answer"}, {})
    assert wire.collect(0, 1, [1], 60.0) == ({}, {1: "no space"})


def test_another_rank_or_another_instance_of_one_is_not_known(ends: Ends) -> None:
    wire = ends.wire(1)
    assert not wire.is_known(Hello(rank=7, purpose="save"))
    assert wire.is_known(Hello(rank=1, instance=3, purpose="save"))
    assert not wire.is_known(Hello(rank=1, instance=4, purpose="save"))
    assert wire.is_known(Hello(rank=1, instance=3, purpose="load"))


# Signs of life.


def noted_beats(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return a list that grows whenever the thread of a wire is about to have a rest."""
    beats: list[float | None] = []
    beat = Wire.beat

    def note(wire: Wire) -> float | None:
        beats.append(beat(wire))
        return beats[-1]

    monkeypatch.setattr(Wire, "beat", note)
    return beats


def test_signs_are_shown_when_they_are_due_and_not_before(ends: Ends, clock: Clock) -> None:
    wire, coordinator = ends.join(Signs(5.0, lambda: (1.5, "work")))
    for now, pause in ((1004.0, 1.0), (1005.0, 5.0), (1005.0, 5.0), (1011.0, 5.0)):
        clock.now = now
        assert wire.beat() == pause
    wire.end_call(0, "")
    assert [frame.kind for frame in coordinator.all()] == [SIGN, SIGN, END]
    assert wire.beat() is None


def test_no_sign_is_shown_while_none_is_to_be(ends: Ends, clock: Clock) -> None:
    wire, coordinator = ends.join(Signs(5.0, lambda: None))
    clock.now = 1005.0
    assert wire.beat() == 5.0
    wire.end_call(0, "")
    assert [frame.kind for frame in coordinator.all()] == [END]


def test_a_call_that_begins_after_its_members_came_shows_signs(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread, which has nothing to do until then, is told."""
    beats = noted_beats(monkeypatch)
    wire = ends.wire(1)
    member = ends.come(wire, 1, 0)
    wait_for(lambda: beats)
    wire.begin_call(0, "save", Signs(0.01, lambda: (0.0, "waits")))
    assert sum(len(member.some()) for _ in range(3)) >= 3


def test_who_comes_learns_at_once_that_the_coordinator_lives(ends: Ends) -> None:
    wire = ends.wire(1, 2)
    first = ends.come(wire, 1, 0)
    wire.begin_call(0, "save", QUIET)
    for member in (first, ends.come(wire, 2, 0)):
        [(kind, number, _)] = member.some()
        assert (kind, number) == (SIGN, 0)


def test_who_does_not_read_gets_no_signs_that_would_pile_up(ends: Ends, clock: Clock) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", Signs(5.0, lambda: (0.0, "")))
    member = ends.come(wire, 1, 0)
    wire.send([1], 0, 0, random.Random(0).randbytes(1 << 22))
    for _ in range(3):
        clock.now += 5.0
        assert wire.beat() == 5.0
    wire.end_call(0, "")
    assert [frame.kind for frame in member.all()] == [SIGN, MESSAGE, END]


# The end of a call.


def test_what_a_connection_does_not_take_at_once_comes_before_the_end(ends: Ends) -> None:
    wire, coordinator = ends.join()
    coordinator.send(message(0, b"begin"))
    assert wire.collect(0, 0, [0], 60.0)[0], "the connection is served by now"
    payload, found = bytes(range(256)) * 250, list[bytes]()
    for _ in range(2):
        for number in range(50):
            wire.send([0], 0, number, payload)
        while len(found) < 50:
            found += [frame.payload for frame in coordinator.some()]
    wire.end_call(0, "")
    found += [frame.payload for frame in coordinator.all(END)]
    assert found == [payload] * 100


def test_a_call_ends_once(ends: Ends) -> None:
    wire, coordinator = ends.join()
    wire.end_call(0, "done")
    wire.end_call(0, "again")
    wire.abandon(0)
    assert [frame.payload for frame in coordinator.all()] == [b"done"]
    wire.beat()


def test_a_call_that_is_abandoned_ends_soon(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = noted_beats(monkeypatch)
    wire, coordinator = ends.join()
    wait_for(lambda: beats)
    wire.abandon(0)
    assert [frame.payload for frame in coordinator.all()] == [b"it has given up"]
    assert wire.arrived(0, 0) == {}


def test_connections_whose_other_end_does_not_close_are_closed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_LINGER_SECONDS", 0.0)
    wire, coordinator = ends.join()
    coordinator.send(message(0, b"begin"))
    assert wire.collect(0, 0, [0], 60.0)[0], "the connection is served by now"
    wire.end_call(0, "")
    vars(wire)["_loop"].wake()
    coordinator.wait_for_close()


def test_a_wire_that_nobody_holds_ends_its_thread() -> None:
    wire = Wire()
    loop: Any = vars(wire)["_loop"]
    wait_for(lambda: any(t.ident == loop._thread for t in threading.enumerate()))
    thread = next(t for t in threading.enumerate() if t.ident == loop._thread)
    del wire
    thread.join(SECONDS)
    assert not thread.is_alive()
