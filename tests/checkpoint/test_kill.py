"""SIGKILL at every storage call of a save: old or new, never a mixture."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..python import run_python


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """Every case of kill_ranks."""
    run = run_python("-m", "tests.checkpoint.kill_ranks", timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def outcomes(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of two ranks."""
    return [case for case in told if "team" not in case]


@pytest.fixture(scope="module")
def teams(told: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of four ranks, by their names."""
    return {case["team"]: case for case in told if "team" in case}


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


def test_what_is_committed_has_been_told(outcomes: list[dict[str, Any]]) -> None:
    """Only a coordinator that was killed after the commit tells nobody of a new checkpoint."""
    for outcome in outcomes:
        if outcome["killed"] and outcome["victim"] == 1:
            assert (outcome["new"] == "2.0") == (outcome["survivor"] == "ok"), outcome
    committed = [o for o in outcomes if o["killed"] and o["new"] == "2.0" and not o["victim"]]
    assert committed, "the coordinator was killed after its publish, too"


def test_the_surviving_rank_learns_of_it(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        if outcome["killed"] and outcome["victim"] == 0:
            assert outcome["survivor"] == "RankFailed", outcome


def test_the_first_rank_writes_what_the_other_one_was_to(outcomes: list[dict[str, Any]]) -> None:
    """Both hold the same, so it can, whenever the other one is killed."""
    for outcome in outcomes:
        if outcome["killed"] and outcome["victim"] == 1:
            assert (outcome["survivor"], outcome["new"]) == ("ok", "2.0"), outcome


@pytest.mark.parametrize(
    ("name", "killed"), [("a replica is left", 3), ("a replica has copied it", 2)]
)
def test_four_ranks_finish_what_one_was_to_write(
    teams: dict[str, dict[str, Any]], name: str, killed: int
) -> None:
    case = teams[name]
    assert case["killed"] == [killed]
    assert set(case["notes"].values()) == {f"without [{killed}]"}
    assert case["loaded"] == "right", "with the values of the call"


@pytest.mark.parametrize(
    ("name", "killed", "why"),
    [
        ("both replicas are killed", [1, 3], "rank 3, who might have, died or fell silent, too"),
        ("there is no replica", [3], "it alone held 'w0' [9:12,0:5]"),
    ],
)
def test_four_ranks_fail_where_nobody_can(
    teams: dict[str, dict[str, Any]], name: str, killed: list[int], why: str
) -> None:
    case = teams[name]
    assert case["killed"] == killed
    (text,) = set(case["notes"].values())
    assert text.startswith("RankFailed: save: write failed: rank ")
    assert why in text
    assert case["loaded"] == "not committed"
