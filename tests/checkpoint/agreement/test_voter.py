"""All ranks save at the same call, or fail alike, in whatever order they get on."""

from __future__ import annotations

import json
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dtckpt.checkpoint.agreement.gate import Agreed, CallGate
from dtckpt.checkpoint.agreement.register import Register
from dtckpt.checkpoint.agreement.voter import ASKED, Pace, Voter
from dtckpt.errors import RankFailed

_c10d: Any = dist
POLL, TIMEOUT = 1.0, 8.0


class Rank:
    """One rank whose thread takes a step, and whose training makes a call, when the test says."""

    def __init__(self, job: Job, index: int, size: int) -> None:
        self.gate = CallGate(60.0)
        self.voter = Voter(
            job.register,
            self.gate,
            tuple(range(size)),
            index,
            Pace(POLL, TIMEOUT, size),
            lambda: job.now,
        )
        self.steps: Generator[float, None, None] = self.voter.steps()
        self.job = job
        self.is_alive = True
        self.wakes = 0.0
        self.num_calls = 0
        self.saves: dict[int, tuple[str, ...]] = {}
        self.errors: list[str] = []
        self.asked: list[tuple[str, int]] = []

    def step(self) -> None:
        if self.is_alive and self.job.now >= self.wakes:
            self.wakes = self.job.now + next(self.steps, float("inf"))

    def call(self) -> None:
        if not self.is_alive or self.gate.is_held:
            return
        number = self.num_calls
        self.num_calls += 1
        try:
            agreed = self.gate.enter()
        except RankFailed as error:
            self.errors.append(str(error))
        else:
            if agreed is not None:
                self.saves[number] = agreed.reasons

    def ask(self, reason: str) -> None:
        if self.is_alive:
            self.asked.append((reason, self.num_calls))
            self.voter.ask(reason, None)
            self.wakes = self.job.now


class Job:
    """Some ranks over one real store, and a clock that only the test moves."""

    def __init__(self, size: int) -> None:
        store = _c10d.HashStore()
        store.set_timeout(timedelta(milliseconds=1))  # nobody may wait in it
        self.register = Register(lambda: store, "test")
        self.now = 0.0
        self.ranks = [Rank(self, index, size) for index in range(size)]

    def settle(self) -> None:
        """Let all ranks that live get on until nothing more can come of what was asked."""
        for _ in range(80):
            for rank in self.ranks:
                rank.step()
                rank.call()
            self.now += 0.5

    def decisions(self) -> list[dict[str, Any]]:
        """Return how the turns have ended, as far as their words are kept."""
        found: list[dict[str, Any]] = []
        for turn in range(100):
            word = self.register.word(turn)
            if word.startswith("{"):
                found.append(json.loads(word))
        return found


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("call"), st.integers(0, 3)),
    st.tuples(st.just("ask"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 0.5, 1.0])),
)


def play(job: Job, actions: list[tuple[str, Any]]) -> None:
    for number, (what, which) in enumerate(actions):
        if what == "wait":
            job.now += which
            continue
        rank = job.ranks[which % len(job.ranks)]
        if what == "step":
            rank.step()
        elif what == "call":
            rank.call()
        elif what == "ask":
            rank.ask(f"reason {number}")
        elif what == "kill":
            rank.is_alive = False
        elif what == "end" and rank.is_alive:
            rank.is_alive = False
            rank.voter.end()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.lists(ACTIONS, max_size=120))
def test_what_is_asked_is_answered_by_the_same_call_everywhere(
    size: int, actions: list[tuple[str, Any]]
) -> None:
    job = Job(size)
    play(job, actions)
    job.settle()
    first = job.ranks[0]
    fewest = min(rank.num_calls for rank in job.ranks)
    for rank in job.ranks:
        assert rank.errors == []
        assert not rank.gate.is_held
        seen = {call: why for call, why in rank.saves.items() if call < fewest}
        assert seen == {call: why for call, why in first.saves.items() if call < fewest}
        for reason, asked_at in rank.asked:
            answers = [call for call, reasons in rank.saves.items() if reason in reasons]
            assert len(answers) == 1
            assert answers[0] >= asked_at


@settings(max_examples=300, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(ACTIONS, max_size=100),
    st.sampled_from(["kill", "end"]),
    st.integers(0, 3),
    st.integers(0, 100),
)
def test_ranks_that_die_or_end_leave_the_others_with_one_story(
    size: int, actions: list[tuple[str, Any]], how: str, which: int, when: int
) -> None:
    job = Job(size)
    actions.insert(when, (how, which))
    play(job, actions)
    job.settle()
    alive = [rank for rank in job.ranks if rank.is_alive]
    fewest = min(rank.num_calls for rank in alive)
    told = {each["failed"] for each in job.decisions() if "failed" in each}
    for rank in alive:
        assert not rank.gate.is_held
        seen = {call: why for call, why in rank.saves.items() if call < fewest}
        assert seen == {call: why for call, why in alive[0].saves.items() if call < fewest}
        assert set(rank.errors) <= told
        assert bool(rank.errors) == bool(alive[0].errors)
        if how == "end":
            assert rank.errors == []
        else:
            lost = job.ranks[which % size]
            assert all(f"rank {job.ranks.index(lost)} lost" in text for text in rank.errors)


def ask_and_settle(job: Job) -> None:
    job.ranks[0].ask("SIGTERM")
    job.settle()


def test_a_rank_that_does_not_answer_is_named_and_nobody_is_held_for_it() -> None:
    job = Job(3)
    job.ranks[2].is_alive = False
    job.ranks[0].ask("SIGTERM")
    for _ in range(7):
        for rank in job.ranks[:2]:
            rank.step()
            rank.call()
            assert not rank.gate.is_held
        job.now += 1.0
    assert [rank.num_calls for rank in job.ranks] == [7, 7, 0]
    job.settle()
    for rank in job.ranks[:2]:
        (text,) = rank.errors
        assert "rank 2 lost" in text
        assert "(SIGTERM)" in text


def test_after_a_failure_the_next_turn_is_a_new_one() -> None:
    job = Job(2)
    stopped = job.ranks[1]
    stopped.is_alive = False
    ask_and_settle(job)
    assert len(job.ranks[0].errors) == 1
    stopped.is_alive = True  # it had only been stopped
    while stopped.num_calls < job.ranks[0].num_calls:
        stopped.step()
        stopped.call()
    assert stopped.errors == job.ranks[0].errors
    ask_and_settle(job)
    assert list(job.ranks[0].saves.values()) == list(stopped.saves.values()) == [("SIGTERM",)]


def test_what_is_asked_again_before_the_agreed_call_is_answered_by_it() -> None:
    job = Job(2)
    first, second = job.ranks
    second.call()
    second.call()  # so the agreed call is the third one
    first.ask("SIGTERM")
    for _ in range(40):
        first.step()
        second.step()
        job.now += 0.5
    second.ask("SIGTERM")
    first.ask("SIGTERM")
    job.settle()
    assert first.saves == second.saves == {2: ("SIGTERM",)}


def test_what_ranks_are_asked_for_at_the_same_time_is_one_save() -> None:
    job = Job(3)
    for rank, reason in zip(job.ranks, ("SIGTERM", "SIGUSR1", "SIGTERM"), strict=True):
        rank.ask(reason)
    job.settle()
    assert [[*rank.saves.values()] for rank in job.ranks] == [[("SIGTERM", "SIGUSR1")]] * 3


def test_turns_that_all_have_left_are_deleted() -> None:
    job = Job(3)
    for number in range(4):
        job.ranks[number % 3].ask(f"reason {number}")
        job.settle()
    assert [job.register.word(turn) for turn in range(3)] == ["", "", ""]
    assert [job.register.note_of(turn, rank) for turn in range(3) for rank in range(3)] == [""] * 9
    assert json.loads(job.register.word(3))["reasons"] == ["reason 3"]


def test_the_shortest_time_counts_on_all_ranks() -> None:
    job = Job(2)
    job.ranks[0].voter.ask("SIGTERM", job.now + 25.0)
    job.ranks[1].voter.ask("SIGTERM", job.now + 20.0)
    found: list[Agreed] = []
    while len(found) < 2:
        for rank in job.ranks:
            rank.wakes = 0.0
            rank.step()
            if not rank.gate.is_held and (agreed := rank.gate.enter()) is not None:
                found.append(agreed)
    assert [agreed.limit for agreed in found] == [20.0, 20.0]


def test_who_comes_too_late_to_the_call_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    job.ranks[0].voter.ask("SIGTERM", 5.0)
    for _ in range(20):
        for rank in job.ranks:
            rank.step()  # and none makes a call
        job.now += 0.5
    (first, second) = caplog.messages
    assert "the time for the save (SIGTERM) is over" in first
    assert first == second


def test_a_store_that_fails_for_a_moment_is_asked_again() -> None:
    class Failing:
        num_left = 3

        def check(self, keys: list[str]) -> bool:
            self.num_left -= 1
            if self.num_left >= 0:
                raise RuntimeError("no route to host")
            return False

    gate = CallGate(1.0)
    failing = Failing()
    voter = Voter(Register(lambda: failing, "x"), gate, (0, 1), 0, Pace(1.0, 8.0, 2))
    steps = voter.steps()
    assert [next(steps) for _ in range(5)] == [2.0, 4.0, 8.0, 1.0, 1.0]
    failing.num_left = 100
    with pytest.raises(RuntimeError, match="no route"):
        list(steps)
    assert not voter.is_asked


def test_the_word_moves_in_single_steps() -> None:
    store = _c10d.HashStore()
    register = Register(lambda: store, "x")
    assert register.word(0) == ""
    assert register.move(0, "", ASKED) == ASKED
    assert register.move(0, "", "other") == ASKED
    assert register.move(0, ASKED, "other") == "other"
    assert register.word(0) == "other"
