"""Load from the living: ranks, hosts and agents are killed, and training goes on."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from dtckpt.storage.peers import job

from ..python import run_python
from ..waiting import wait_for


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the runs of living_ranks have told, by name."""
    folder = tmp_path_factory.mktemp("living")
    before = set(os.listdir("/dev/shm"))
    run = run_python(
        *("-m", "tests.checkpoint.living_ranks", folder),
        env=os.environ | {job.FOLDER: str(folder / "agents"), "GLOO_SOCKET_IFNAME": "lo"},
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = {told["name"]: told for told in map(json.loads, run.stdout.splitlines())}
    wait_for(lambda: set(os.listdir("/dev/shm")) <= before)  # other tests have some for a while
    for name, told in found.items():
        if name != "first":
            assert set(told["codes"]) == {0}, run.stderr[-4000:]
    return found


def ends(told: dict[str, Any]) -> list[float]:
    """The rows of all ranks after six steps, in order."""
    rows: list[float] = []
    for rank in told["told"]:
        step, start, part = rank["end"] if isinstance(rank, dict) else rank
        assert (step, start) == (6, len(rows))
        rows += part
    return rows


def test_a_killed_rank_leaves_what_was_committed(outcomes: dict[str, dict[str, Any]]) -> None:
    first = outcomes["first"]
    assert first["codes"] == [0, 0, 0, -signal.SIGKILL]
    assert first["told"] == ["RankFailed"] * 3 + [None]


@pytest.mark.parametrize(
    "name", ["replacement", "three ranks", "a host without an agent", "a host has died"]
)
def test_ranks_load_from_memory_alone(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    for rank in outcomes[name]["told"]:
        assert rank["loaded"] == 2, "the newest that is whole"
        assert rank["bytes_read"] >= rank["needed"] > 0
    assert ends(outcomes[name]) == ends(outcomes["uninterrupted"])


def test_without_agents_the_disk_has_it(outcomes: dict[str, dict[str, Any]]) -> None:
    told = outcomes["all have died"]
    for rank in told["told"]:
        assert rank["latest"] in ("None", "StorageError")
        assert rank["load"] in ("NotCommitted", "StorageError")
    assert ends(told) == ends(outcomes["uninterrupted"])
