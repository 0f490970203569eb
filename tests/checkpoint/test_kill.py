"""SIGKILL at every storage call of a save: old or new, never a mixture."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..python import run_python


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """Every case of kill_ranks."""
    run = run_python("-m", "tests.checkpoint.kill_ranks", timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_every_storage_call_was_hit(outcomes: list[dict[str, Any]]) -> None:
    for victim in (0, 1):
        kills = [o for o in outcomes if o["victim"] == victim and o["killed"]]
        assert len(kills) >= 12
    survived = [o for o in outcomes if not o["killed"]]
    ends = [o for o in survived if o["nth"] > o["num_calls"]]
    assert len(ends) == 8, "every series ends with a save that has no call left to kill in"
    assert all(o["survivor"] == "ok" and o["new"] == "2.0" for o in survived)


def test_the_previous_checkpoint_loads(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        if not outcome["overwrite"]:
            assert outcome["previous"] == "1.0", outcome


def test_the_new_one_is_complete_or_not_committed(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        before = "1.0" if outcome["overwrite"] else "not committed"
        assert outcome["new"] in (before, "2.0"), outcome


def test_only_a_kill_after_the_commit_leaves_a_new_checkpoint(
    outcomes: list[dict[str, Any]],
) -> None:
    """A rank that only writes data can never leave a committed checkpoint by dying."""
    for outcome in outcomes:
        if outcome["killed"] and outcome["victim"] == 1:
            assert outcome["new"] != "2.0", outcome
    committed = [o for o in outcomes if o["killed"] and o["new"] == "2.0"]
    assert committed, "the coordinator was killed after its publish, too"


def test_the_surviving_rank_learns_of_it(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        if outcome["killed"]:
            assert outcome["survivor"] == "RankFailed", outcome
