"""Members that come to a call before or after the others, or to another one, or not any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dtckpt.checkpoint.ranks import wire as wire_module
from dtckpt.checkpoint.ranks.call import CallNumbers
from dtckpt.checkpoint.ranks.frames import END, MESSAGE, SIGN, end, message, sign
from dtckpt.checkpoint.ranks.link import Link
from dtckpt.checkpoint.ranks.wire import Wire

from ...waiting import wait_for
from .wire_ends import QUIET, Clock, End, Ends, on_wait


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


# Before the call begins.


def test_a_member_that_gave_up_before_the_call_began_is_lost_to_it(ends: Ends) -> None:
    """And to no other call."""
    wire = ends.wire(1)
    gone = ends.come(wire, 1, 0, message(0, b"alone"), end("it was impatient"))
    assert gone.all() == [], "the coordinator ends it, too"
    ends.come(wire, 1, 1, message(0, b"together"))
    wire.begin_call(0, "save", QUIET)
    assert wire.collect(0, 0, [1], 20.0) == ({}, {1: "it was impatient"})
    wire.begin_call(1, "save", QUIET)
    assert wire.collect(1, 0, [1], 20.0) == ({1: b"together"}, {})


def test_a_member_that_broke_off_before_the_call_began_fails_it(ends: Ends) -> None:
    """It has died, or the network failed it: it will not come to this one any more."""
    wire = ends.wire(1)
    ends.come(wire, 1, 0).socket.close()
    link: Link = vars(wire)["_early"][0][1]
    wait_for(lambda: link.lost)
    wire.begin_call(0, "save", QUIET)
    assert "closed its connection" in wire.collect(0, 0, [1], 20.0)[1][1]


def test_a_member_that_comes_to_a_call_again_takes_its_own_place(ends: Ends) -> None:
    wire = ends.wire(1)
    before = ends.come(wire, 1, 0, message(0, b"before"))
    now = ends.come(wire, 1, 0, message(0, b"now"))
    assert before.all() == []
    wire.begin_call(0, "save", QUIET)
    assert wire.collect(0, 0, [1], 60.0) == ({1: b"now"}, {})
    assert now.some()[0].kind == SIGN


def test_eight_calls_of_a_member_may_wait(ends: Ends) -> None:
    """Of the one that is forgotten it is known all the same that the member is not at it."""
    wire = ends.wire(1)
    members = [ends.come(wire, 1, call) for call in range(8)]
    assert all(member.is_silent() for member in members)
    members.append(ends.come(wire, 1, 8))
    assert members[0].all() == []
    assert all(member.is_silent() for member in members[1:])
    wire.begin_call(0, "save", QUIET)
    assert "was at call 8" in wire.collect(0, 0, [1], 20.0)[1][1]
    wire.begin_call(8, "save", QUIET)
    members[8].send(message(0, b"here"))
    assert wire.collect(8, 0, [1], 20.0) == ({1: b"here"}, {})


def test_nothing_of_what_came_early_is_kept_twice(ends: Ends) -> None:
    """Answers can be large."""
    wire = ends.wire(1)
    ends.come(wire, 1, 0, message(0, b"answer"))
    link: Link = vars(wire)["_early"][0][1]
    wait_for(lambda: link.early)
    wire.begin_call(0, "save", QUIET)
    assert link.early == []
    assert wire.collect(0, 0, [1], 60.0)[0] == {1: b"answer"}


# At another call.


def test_a_rank_that_calls_something_else_gets_the_answer_that_says_so(ends: Ends) -> None:
    wire = ends.wire(1)
    ends.come(wire, 1, 0, message(0, b"fine"), purpose="load")
    wire.begin_call(0, "save", QUIET, lambda purpose: f"not {purpose}".encode())
    assert wire.collect(0, 0, [1], 20.0) == ({1: b"not load"}, {})


def test_a_member_that_could_not_reach_an_earlier_call_is_lost_to_that_one(ends: Ends) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    ahead = ends.come(wire, 1, 1)
    _, lost = wire.collect(0, 0, [1], 20.0)
    assert "it was at call 1 over this group when the first rank was at call 0" in lost[1]
    ahead.send(message(0, b"here"))
    wire.begin_call(1, "save", QUIET)
    assert wire.collect(1, 0, [1], 20.0) == ({1: b"here"}, {})


def test_who_has_been_at_a_later_call_cannot_come_back(ends: Ends) -> None:
    wire = ends.wire(1)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 1)
    back = ends.come(wire, 1, 0, message(0, b"back"))
    assert [frame.kind for frame in back.all()] == [END]
    answers, lost = wire.collect(0, 0, [1], 60.0)
    assert answers == {}
    assert "it was at call 1 " in lost[1]


def test_a_member_at_a_call_that_is_left_out_is_told_of_the_next_one(ends: Ends) -> None:
    wire = ends.wire(1)
    member = ends.come(wire, 1, 3)
    wire.begin_call(5, "save", QUIET)
    assert member.all() == [(END, 6, b"it has left call 3 over this group")]


def test_a_member_leaves_out_the_calls_that_it_is_told_to(ends: Ends) -> None:
    for frame in (sign(0.0, next_call=7), end("", 7)):
        calls = CallNumbers()
        wire, coordinator = ends.join(numbers=calls)
        coordinator.send(frame, message(0, b"decision"))
        assert wire.collect(0, 0, [0], 60.0)[0] == {0: b"decision"}
        assert calls.enter() == 7


def test_the_coordinator_leaves_out_none_because_a_member_says_so(ends: Ends) -> None:
    calls = CallNumbers()
    wire = ends.wire(1, numbers=calls)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 0, sign(0.0, next_call=7), message(0, b"answer"))
    assert wire.collect(0, 0, [1], 60.0)[0] == {1: b"answer"}
    assert calls.enter() == 0


# After a call has failed.


@pytest.mark.parametrize("is_over", [True, False])
def test_a_member_that_comes_too_late_learns_how_the_call_failed(ends: Ends, is_over: bool) -> None:
    wire = ends.wire(1)
    wire.begin_call(4, "save", QUIET)
    wire.fail_call(4, b"failed")
    if is_over:
        wire.end_call(4, "")
        wire.begin_call(5, "save", QUIET)
    assert ends.come(wire, 1, 4).all()[0] == (MESSAGE, 0, b"failed")
    if is_over:
        ends.come(wire, 1, 5, message(0, b"in time"))
        assert wire.collect(5, 0, [1], 20.0) == ({1: b"in time"}, {})


def test_of_some_failed_calls_it_is_remembered_how(ends: Ends) -> None:
    wire = ends.wire(1)
    for call in range(17):
        wire.begin_call(call, "save", QUIET)
        wire.fail_call(call, b"%d" % call)
        wire.end_call(call, "")
    told = [[frame.payload for frame in ends.come(wire, 1, n).all(END)] for n in (0, 1, 16)]
    assert told == [[], [b"1"], [b"16"]]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_member_that_is_late_again_and_again_skips_a_call(ends: Ends, is_first: bool) -> None:
    """It has made fewer calls than others, and is late by one whenever all make one."""
    wire, found = ends.wire(1), list[int]()
    for call in (6, 7):
        wire.begin_call(call, "save", QUIET)
        wire.fail_call(call, b"failed")
        wire.end_call(call, "")
        if call == 7 and is_first:
            wire.begin_call(8, "save", QUIET)
        found.append(ends.come(wire, 1, call).all()[1].number)
    if not is_first:
        wire.begin_call(8, "save", QUIET)
    assert found == [0, 9]
    assert "when the first rank was at call 8" in wire.collect(8, 0, [1], 20.0)[1][1]


def fail_once(ends: Ends, wire: Wire, how: str) -> tuple[End, Callable[[], End]]:
    """Have rank 1 be a call ahead in a call that fails, and in the next one; rank 2 is not.

    Returns rank 2 at that next call, and what has rank 1 come to the one after it.
    """
    if how == "gave up":
        assert ends.come(wire, 1, 0, end("impatient")).all() == []
    wire.begin_call(0, "save", QUIET)
    assert ends.come(wire, 1, 1, end("impatient")).all() == []
    wire.fail_call(0, b"failed")
    wire.end_call(0, "")
    wire.begin_call(1, "save", QUIET)
    return ends.come(wire, 2, 1), lambda: ends.come(wire, 1, 2)


@pytest.mark.parametrize("how", ["gave up", "was ahead"])
def test_all_go_on_with_the_next_call_of_a_member_that_is_ahead_twice(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    calls, came = CallNumbers(), list[End]()
    wire = ends.wire(1, 2, numbers=calls)
    other, come = fail_once(ends, wire, how)
    monkeypatch.setattr(wire_module, "_AHEAD_SECONDS", 1e5)
    on_wait(wire, monkeypatch, lambda: came.append(come()))
    wire.fail_call(1, b"failed")
    wait_for(lambda: came)
    assert calls.enter() == 3
    assert [(frame.kind, frame.number) for frame in came[0].all()] == [(END, 3)]
    wire.end_call(1, "")
    assert [frame.number for frame in other.all(END)] == [0, 3]
    assert ends.come(wire, 2, 2).all()[-1].kind == END
    ends.come(wire, 1, 3, message(0, b"together"))
    wire.begin_call(3, "save", QUIET)
    assert wire.collect(3, 0, [1], 60.0) == ({1: b"together"}, {})


def test_it_is_not_waited_for_any_longer_than_some_seconds(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    wire = ends.wire(1, 2)
    other, _ = fail_once(ends, wire, "was ahead")
    clock.now += 0.5
    waits = clock.moves_in(wire)
    wire.fail_call(1, b"failed")
    assert waits == [1.5]
    wire.end_call(1, "")
    assert [frame.number for frame in other.all(END)] == [0], "it leaves nothing out"


def test_nobody_is_waited_for_when_a_call_fails_for_the_first_time(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = ends.wire(1)
    waits = Clock(monkeypatch).moves_in(wire)
    wire.begin_call(0, "save", QUIET)
    ends.come(wire, 1, 1)
    wire.fail_call(0, b"failed")
    assert waits == []


# Ranks that number a call differently know it by its target.


def begin(wire: Wire, call: int, target: int) -> None:
    wire.begin_call(call, "save", QUIET, target=target)


def fail(wire: Wire, call: int) -> None:
    wire.fail_call(call, b"failed")
    wire.end_call(call, "")


@pytest.mark.parametrize("is_first", [True, False])
def test_member_that_left_out_a_call_joins_the_next_call_with_its_target(
    ends: Ends, is_first: bool
) -> None:
    wire = ends.wire(1)
    begin(wire, 0, target=10)
    fail(wire, 0)
    if not is_first:
        begin(wire, 1, target=11)
    member = ends.come(wire, 1, 0, message(0, b"together"), target=11)
    if is_first:
        begin(wire, 1, target=11)
    assert wire.collect(1, 0, [1], 60.0) == ({1: b"together"}, {})
    wire.end_call(1, "")
    assert [frame.number for frame in member.all(END, MESSAGE)] == [0, 2], "its next call is call 2"


@pytest.mark.parametrize("is_first", [True, False])
def test_coordinator_that_left_out_a_call_meets_members_at_their_next_one(
    ends: Ends, is_first: bool
) -> None:
    numbers = CallNumbers()
    wire = ends.wire(1, 2, numbers=numbers)
    for rank in (1, 2):
        assert ends.come(wire, rank, 0, end("impatient"), target=10).all() == []
    if not is_first:
        begin(wire, numbers.enter(), target=11)
    members = [ends.come(wire, r, 1, message(0, b"together"), target=11) for r in (1, 2)]
    if is_first:
        begin(wire, numbers.enter(), target=11)
    assert wire.collect(0, 0, [1, 2], 60.0) == (dict.fromkeys((1, 2), b"together"), {})
    wire.end_call(0, "")
    assert [frame.number for member in members for frame in member.all(END, MESSAGE)][-1] in (0, 2)
    assert numbers.enter() == 2


def test_member_late_for_a_call_does_not_join_another_one_with_the_same_target(
    ends: Ends,
) -> None:
    """It would bring the state that it had then."""
    wire = ends.wire(1)
    for call, target in enumerate((10, 11, 10, 11)):
        begin(wire, call, target)
        fail(wire, call)
    begin(wire, 4, target=10)
    assert [frame.payload for frame in ends.come(wire, 1, 0, target=10).all(END)] == [b"failed"]
    assert ends.come(wire, 1, 1, target=10).all()[-1].kind == END, "call 2 was for it"
    begin(wire, 5, target=12)
    ends.come(wire, 1, 2, message(0, b"together"), target=12)
    assert wire.collect(5, 0, [1], 60.0) == ({1: b"together"}, {})


def test_coordinator_late_for_a_call_meets_nobody_at_another_one_with_the_same_target(
    ends: Ends,
) -> None:
    wire = ends.wire(1, 2)
    ends.come(wire, 1, 0, end("impatient"), target=10)
    ends.come(wire, 1, 1, message(0, b"again"), target=10)
    ends.come(wire, 2, 1, message(0, b"again"), target=10)  # of its call 0 nothing is known
    begin(wire, 0, target=10)
    answers, lost = wire.collect(0, 0, [1, 2], 60.0)
    assert answers == {}
    assert lost.keys() == {1, 2}


@pytest.mark.parametrize(
    ("before", "number"), [("member", 0), ("coordinator", 2)], ids=["member", "coordinator"]
)
def test_ranks_that_mistook_a_call_for_another_are_together_at_the_next_one(
    ends: Ends, before: str, number: int
) -> None:
    """They have made the calls 10, 11, 12, but one of them has left out the first."""
    wire = ends.wire(1)
    ahead = before == "member"
    begin(wire, 0, target=10 if ahead else 11)
    ends.come(wire, 1, 0, message(0, b"other target"), target=11 if ahead else 10)
    assert wire.collect(0, 0, [1], 60.0) == ({1: b"other target"}, {}), "told by who compares"
    fail(wire, 0)
    begin(wire, 1, target=11 if ahead else 12)
    member = ends.come(wire, 1, 1, message(0, b"together"), target=12 if ahead else 11)
    if ahead:
        assert wire.collect(1, 0, [1], 60.0)[1].keys() == {1}
        fail(wire, 1)
        begin(wire, 2, target=12)
        assert wire.collect(2, 0, [1], 60.0) == ({1: b"together"}, {})
    else:
        assert member.all()[-1].kind == END
        ends.come(wire, 1, 2, message(0, b"together"), target=12)
        assert wire.collect(1, 0, [1], 60.0) == ({1: b"together"}, {})


def test_member_with_another_target_that_both_have_had_is_told_so(ends: Ends) -> None:
    """It has not mistaken the call: its arguments are wrong."""
    wire = ends.wire(1)
    for call, target in enumerate((10, 11)):
        begin(wire, call, target)
        ends.come(wire, 1, call, target=target)
        fail(wire, call)
    begin(wire, 2, target=10)
    ends.come(wire, 1, 2, message(0, b"other target"), target=11)
    assert wire.collect(2, 0, [1], 60.0) == ({1: b"other target"}, {})


def test_member_whose_call_nobody_makes_learns_so_after_some_seconds(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = ends.wire(1, 2)
    begin(wire, 0, target=10)
    fail(wire, 0)
    member = ends.come(wire, 1, 0, target=11)
    other = ends.come(wire, 2, 0, target=11)
    begin(wire, 1, target=12)
    assert member.all()[-1].kind == other.all()[-1].kind == END, "the next call is another one"
    fail(wire, 1)
    clock = Clock(monkeypatch)
    member = ends.come(wire, 1, 1, target=13)
    clock.now += 9.9
    assert wire.beat() == pytest.approx(0.1)
    clock.now += 0.1
    assert wire.beat() is None
    assert [frame.payload for frame in member.all(END)] == [b"failed"]


def test_member_whose_departure_is_read_after_the_call_has_begun_comes_again(ends: Ends) -> None:
    """What it has sent for a call that it has given up is not taken for the one of now."""
    wire = ends.wire(1)
    gone = ends.come(wire, 1, 0, message(0, b"given up"), target=10)
    begin(wire, 0, target=11)
    gone.send(end("impatient"))
    assert gone.all(SIGN) == []
    ends.come(wire, 1, 1, message(0, b"together"), target=11)
    assert wire.collect(0, 0, [1], 60.0) == ({1: b"together"}, {})
