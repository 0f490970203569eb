"""Two jobs save to one path at once: one of them wins as a whole, and both know which."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..python import run_python


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """Every round of rival_jobs."""
    run = run_python("-m", "tests.checkpoint.rival_jobs", timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert {(o["overwrite"], o["background"]) for o in found} == {
        (overwrite, background) for overwrite in (False, True) for background in (False, True)
    }
    return found


def test_one_job_commits_and_the_other_takes_its_files_away(
    outcomes: list[dict[str, Any]],
) -> None:
    for outcome in outcomes:
        notes = outcome["notes"]
        winner = notes.index(["ok", "ok"])
        assert notes[1 - winner] == ["AlreadyCommitted", "AlreadyCommitted"], outcome
        assert outcome["values"] == [winner + 1.0], outcome
        assert outcome["num_problems"] == 0, outcome
        assert outcome["data_files"] == [2, 0], outcome
