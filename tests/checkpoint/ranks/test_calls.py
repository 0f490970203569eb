"""Ranks that are not at the same call: an error on all of them, and they are together again.

Whatever has happened before, nobody's answer is ever taken for that of another call.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks import wire
from dtckpt.checkpoint.ranks.boards import StoreBoard
from dtckpt.checkpoint.ranks.call import CallNumbers
from dtckpt.checkpoint.ranks.greeting import Invitation, probe
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.ranks.together import closing, ranks_of, together
from dtckpt.errors import CheckpointError, LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks
from ...waiting import beside_each_other, waits
from .plain_groups import Group, run

_c10d: Any = dist
SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=60)


def call(
    group: Any, name: str, timeout: timedelta = LONG, purpose: str = "save", target: str = ""
) -> str:
    """Make a call that each rank gives a name, and return the names, or why it failed."""
    try:
        ranks = ranks_of(group, timeout=timeout, purpose=purpose, target=target)
        with closing(ranks):
            found = together(ranks, purpose, name.encode, lambda a: b" ".join(a.values()))
        return found.decode()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def until_heard(group: Any) -> None:
    """Wait until the coordinator has read all that this rank has sent before."""
    route = vars(members_of(group).route)
    word = StoreBoard(group.get_group_store()).read()
    assert word is not None
    invitation = Invitation.from_bytes(word)
    probe(invitation.addresses[0], invitation, group.rank(), route["_instance"], 20.0)


@waits
def test_a_rank_that_comes_too_late_is_not_taken_for_one_of_the_next_call() -> None:
    failed, gate = threading.Event(), threading.Barrier(3)

    def body(rank: int, group: Any) -> list[str]:
        found = [call(group, "first")]
        if rank == 1:
            failed.wait(60)
            found.append(call(group, "late"))
        else:
            found.append(call(group, "timely", SHORT))
            failed.set()
        gate.wait(60)
        return [*found, call(group, "third")]

    for found in run(3, body).values():
        assert found[0] == "first first first"
        assert found[1].startswith("RankFailed: save failed: rank 1 is lost: it showed no sign of")
        assert found[2] == "third third third"


@waits
def test_nor_where_the_others_are_waiting_in_the_next_call() -> None:
    """Its next call is that one."""
    failed = threading.Event()

    def body(rank: int, group: Any) -> list[str]:
        if rank == 1:
            failed.wait(60)
            found = [call(group, "late")]
        else:
            found = [call(group, "timely", SHORT)]
            failed.set()
        return [*found, call(group, "again")]

    for found in run(3, body).values():
        assert found[0].startswith("RankFailed: save failed: rank 1 is lost: ")
        assert found[1] == "again again again"


@waits
def test_a_rank_that_gave_up_before_the_others_came_is_lost_to_them_at_once() -> None:
    given_up, gate = threading.Event(), threading.Barrier(2)

    def body(rank: int, group: Any) -> list[str]:
        found = [call(group, "first")]
        if rank == 1:
            found.append(call(group, "early", SHORT))
            until_heard(group)
            given_up.set()
        else:
            given_up.wait(60)
            found.append(call(group, "slow", timedelta(hours=1)))
        gate.wait(60)
        return [*found, call(group, "third")]

    found = run(2, body)
    assert found[0][0] == found[1][0] == "first first"
    assert "RankFailed: save failed: rank 1 is lost: it has given up" in found[0][1]
    assert "RankFailed: save: rank 0, which coordinates ranks 0-1, is lost" in found[1][1]
    assert found[0][2] == found[1][2] == "third third"


@waits
def test_a_rank_that_gave_up_and_tries_again_is_not_taken_for_the_call_that_it_gave_up() -> None:
    given_up = threading.Event()

    def body(rank: int, group: Any) -> list[str]:
        if rank == 1:
            found = [call(group, "1st", SHORT)]
            given_up.set()
        else:
            given_up.wait(60)
            found = []
        while len(found) < 5 and (not found or "Rank" in found[-1]):
            found.append(call(group, "again", timedelta(minutes=10)))
        return found

    found = run(2, body)
    assert found[0][-1] == found[1][-1] == "again again"
    assert len(found[0]) == 2
    assert len(found[1]) <= 3


@waits
def test_the_next_save_is_whole_after_one_that_a_rank_left_out() -> None:
    """Its target tells that it is the same call, which the ranks number differently."""

    def check(skipper: int) -> None:
        gate = threading.Barrier(3)

        def body(rank: int, group: Any) -> list[str]:
            found = [call(group, "first", target="step_0")]
            if rank != skipper:
                failed = call(group, "second", timedelta(seconds=4), target="step_1")
                assert failed.startswith("RankFailed"), failed
            for number in range(2, 5):
                gate.wait(90)  # a step of the training
                found.append(call(group, str(number), target=f"step_{number}"))
            return found

        expected = ["first first first", "2 2 2", "3 3 3", "4 4 4"]
        assert run(3, body) == dict.fromkeys(range(3), expected)

    beside_each_other(check, [(0,), (1,), (2,)])


@waits
def test_a_rank_that_was_started_anew_alone_is_an_error_on_all() -> None:
    """It has a new process, and so a new group over the same store; the others keep theirs."""

    def check(restarted: int) -> None:
        store, gate = _c10d.HashStore(), threading.Barrier(2)

        def body(rank: int, group: Any) -> list[str]:
            found = [call(group, "x")]
            gate.wait(20)
            if rank == restarted:
                members_of(group).wire.close()
                group = Group(store, rank, 2)
                members_of(group)
            gate.wait(20)
            # Why is learnt from the first rank, as long as it is there.
            found.append(call(group, "y", SHORT if restarted == 0 else 3 * SHORT))
            return found

        found = run(2, body, store)
        for texts in found.values():
            assert texts[0] == "x x"
            assert texts[1].startswith("RankFailed")
        if restarted == 1:
            assert "know this rank as another process" in found[1][1]

    beside_each_other(check, [(0,), (1,)])


def test_ranks_that_made_other_calls_than_all_are_together_again_after_some_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank skipped a call, its own error having kept it from it, or made one alone."""
    monkeypatch.setattr(wire, "_AHEAD_SECONDS", 20.0)

    def check(other: int, makes_more: bool) -> None:
        gate = threading.Barrier(3)

        def body(rank: int, group: Any) -> list[str]:
            found = [call(group, "first")]
            if (rank == other) == makes_more:
                call(group, "alone", SHORT)
            for number in range(5):
                if rank:
                    until_heard(group)
                gate.wait(90)  # a step of the training
                found.append(call(group, str(number), timedelta(seconds=2)))
            return found

        found = run(3, body)
        for texts in found.values():
            assert texts[0] == "first first first"
            assert texts[-1] == "4 4 4", found
            for number, text in enumerate(texts[1:]):
                assert text == " ".join([str(number)] * 3) or text.startswith("RankFailed"), found

    beside_each_other(check, product((0, 1, 2), (True, False)))


def test_different_calls_of_one_number_are_refused_on_both_sides() -> None:
    def body(rank: int, group: Any) -> list[str]:
        names = ["save", "load"] if rank == 1 else ["load", "save"]
        return [*(call(group, "x", purpose=name) for name in names), call(group, "x")]

    for found in run(3, body).values():
        assert "rank 1: this rank calls save where rank 0 calls load. All ranks make" in found[0]
        assert "rank 1: this rank calls load where rank 0 calls save. All ranks make" in found[1]
        assert found[2] == "x x x"


def test_calls_are_told_apart_by_the_whole_of_their_names() -> None:
    long = "look at the checkpoints of a run"

    def body(rank: int, group: Any) -> list[str]:
        found = [call(group, "x", purpose=purpose) for purpose in (long, f"{long} {rank}")]
        with pytest.raises(ValueError, match="a purpose has at most 48 bytes"):
            call(group, "x", purpose=long * 2)
        return found

    for same, other in run(2, body).values():
        assert same == "x x"
        assert f"this rank calls {long} 1 where rank 0 calls {long} 0" in other


def test_the_latest_checkpoint_of_other_roots_is_refused() -> None:
    store = MemoryStore()
    for root in "ab":
        dcp.save({"x": 1}, store.substore(f"{root}/step-{ord(root)}"))

    def body(rank: int, group: Any) -> Any:
        return dcp.latest(store.substore("ab"[rank]), process_group=group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    for error in failure.value.errors.values():
        assert isinstance(error, LayoutMismatch)
        assert "were not given the same root: rank 1" in str(error)


def test_a_save_in_the_background_and_a_load_in_the_foreground_keep_apart() -> None:
    store, gate = MemoryStore(), threading.Barrier(3)
    dcp.save({"x": torch.ones(3)}, store.substore("old"))

    def body(rank: int, group: Any) -> None:
        for number in range(4):
            target = store.substore(str(number))
            handle = dcp.async_save({"t": torch.ones(5)}, target, process_group=group)
            if rank == number % 3:
                gate.wait(30)
            into = {"x": torch.zeros(3)}
            if rank != number % 3:
                gate.wait(30)
            dcp.load(into, store.substore("old"), process_group=group)
            assert into["x"].tolist() == [1.0] * 3
            handle.result(60)

    run_ranks(3, body)


def test_word_of_a_group_before_of_the_same_name_is_not_believed_while_its_listener_lives() -> None:
    store, tried = _c10d.HashStore(), threading.Event()
    before: list[Any] = []

    def first(rank: int, group: Any) -> str:
        before.append(group)  # so it lives
        return call(group, "before")

    def second(rank: int, group: Any) -> str:
        if rank == 0:
            tried.wait(20)
        else:
            threading.Timer(0.5, tried.set).start()
        return call(group, "after")

    assert run(2, first, store) == {0: "before before", 1: "before before"}
    assert run(2, second, store) == {0: "after after", 1: "after after"}


def test_numbers_are_given_once() -> None:
    calls = CallNumbers()
    assert [calls.enter(), calls.enter()] == [0, 1]
    calls.skip_to(5)
    calls.skip_to(3)
    assert calls.enter() == 5
