"""SIGSTOP at every phase of a save: the others name the silent rank, and go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..python import run_python


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """Every case of stop_ranks."""
    run = run_python("-m", "tests.checkpoint.stop_ranks", timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_other_rank_finds_out_and_names_it(outcomes: list[dict[str, Any]]) -> None:
    assert {(o["victim"], o["at"]) for o in outcomes} >= {
        (victim, at) for victim in (0, 1) for at in ("state_dict", "create", "write", "close")
    } | {(0, "publish")}
    for outcome in outcomes:
        assert not outcome["time_up"], outcome
        assert outcome["ends"] == [0, 0], outcome
        told = outcome["stopped" if is_replaced(outcome) else "survivor"]
        assert told.startswith("RankFailed: save: "), outcome
        assert f"rank {outcome['victim']}" in told, outcome
        assert "no sign of life within" in told, outcome


def is_replaced(outcome: dict[str, Any]) -> bool:
    """Whether the first rank can write what the other one was to write."""
    return outcome["victim"] == 1 and outcome["at"] != "state_dict"


def test_a_stopped_rank_learns_that_it_was_left_behind(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        if is_replaced(outcome):
            assert outcome["survivor"] == "ok", outcome
        elif outcome["victim"] == 1:
            assert outcome["stopped"] == outcome["survivor"], outcome


def test_nothing_half_written_is_ever_committed(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["old"] == "1.0", outcome
        assert outcome["new"][0] in ("NotCommitted", "2.0"), outcome
        # A coordinator may wake up and commit what is complete; nobody else ever commits.
        if outcome["victim"] == 1:
            assert outcome["new"][0] == ("2.0" if is_replaced(outcome) else "NotCommitted"), outcome


def test_the_next_save_over_the_same_group_works(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["next"] == ["ok", "ok"], outcome
        assert outcome["new"][1] == "2.0", outcome
