"""Runs that are killed while they promote, at one storage call of the root after the other.

Importing torch takes seconds, so one process does it and forks a run per case. It prints a JSON
object per case: which steps the root holds whole, and what a run that goes on has restored and
saved. Run as a program by test_killed_promotions.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import CheckpointManager, Tier
from dtckpt.storage import FaultyStore, Kill, LocalStore, Rule


def state(value: float) -> dict[str, object]:
    return {"w": torch.full((2000,), value), "step": value}


def run(place: Path, nth: int) -> int:
    """Save two steps, and die at a call of the root; return how many there were."""
    store = FaultyStore(LocalStore(place / "root"), [Rule(Kill(), nth=nth)])
    with CheckpointManager(store, tiers=[Tier(place / "fast")]) as manager:
        for step in (1, 2):
            manager.save(step, state(step), force=True)
    return len(store.calls)


def go_on(place: Path) -> dict[str, object]:
    """Look at what is left, and go on from it."""
    steps = dcp.committed_steps(place / "root")
    whole = [not dcp.verify(step.url).problems for step in steps]
    got = state(0)
    with CheckpointManager(place / "root", tiers=[Tier(place / "fast")]) as manager:
        manager.restore_if_any(got)
        manager.save(3, state(3))
    newest = state(0)
    dcp.load(newest, place / "root" / "step-3")
    after = dcp.committed_steps(place / "root")
    return {
        "root": [step.number for step in steps],
        "after": [step.number for step in after],
        "whole": all(whole) and not any(dcp.verify(step.url).problems for step in after),
        "restored": got["step"],
        "saved": newest["step"],
    }


def main(every: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        num_calls = run(Path(name) / "all", 1 << 30)
        for nth in range(1, num_calls + 1, every):
            place = Path(name) / str(nth)
            child = os.fork()
            if child == 0:
                run(place, nth)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            print(json.dumps({"nth": nth, "killed": killed, **go_on(place)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
