"""Two ranks save; one is stopped (SIGSTOP) at a chosen point. Run as a program by test_stop.

The other one must find out by itself. Then the stopped rank is woken up, and both save again with
the same group. Cases run side by side, since all they do is wait. One JSON object is printed for
each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import CheckpointError
from dtckpt.storage import Fault, FaultyStore, LocalStore, Rule

from ..ranks import _c10d as c10d  # pyright: ignore[reportPrivateUsage]
from ..ranks import gloo_group
from .kill_ranks import NEW, OLD, loaded, state

SILENCE = timedelta(seconds=1)
PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Stop(Fault):
    """Stop the process before the effect."""

    def before(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class StopsInCallback:
    """A component of the state that stops its process when it is asked for its state."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {"x": 1}

    def load_state_dict(self, _: object) -> None:
        raise NotImplementedError


class Callback:
    """The same component without the stop."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, _: object) -> None:
        raise NotImplementedError


@dataclass
class Case:
    """One stop and the processes that live through it."""

    victim: int
    at: str
    root: Path
    pids: list[int]

    def note(self, rank: int, number: int) -> Path:
        return self.root / f"note-{rank}-{number}"


def run_rank(case: Case, rank: int) -> None:
    """Save twice in a forked rank, and leave a note of how each save ended."""
    group = gloo_group(c10d.FileStore(str(case.root / "rendezvous"), 2), rank, 2, PATIENCE)
    rules: list[Rule] = []
    if rank == case.victim and case.at != "state_dict":
        rules = [Rule(Stop(), op=case.at, nth=1)]
    stops = rank == case.victim and case.at == "state_dict"
    component = StopsInCallback() if stops else Callback()
    for number, timeout in enumerate((SILENCE, PATIENCE)):
        store = FaultyStore(LocalStore(case.root / f"new-{number}"), rules)
        note = "ok"
        try:
            value = state(NEW) | {"c": component if number == 0 else Callback()}
            dcp.save(value, store, process_group=group, timeout=timeout)
        except CheckpointError as error:
            note = f"{type(error).__name__}: {error}"
        path = case.note(rank, number)
        path.with_suffix(".tmp").write_text(note)
        path.with_suffix(".tmp").rename(path)
        rules = []
    os._exit(0)


def start(victim: int, at: str, folder: Path) -> Case:
    """Fork the ranks of a case."""
    root = folder / f"{victim}-{at}"
    root.mkdir()
    dcp.save(state(OLD), root / "old")
    case = Case(victim, at, root, [])
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            run_rank(case, rank)
        case.pids.append(pid)
    return case


def finish(case: Case) -> dict[str, Any]:
    """Wake the victim once the other rank has given up, and say how it all ended."""
    survivor = 1 - case.victim
    deadline = time.monotonic() + 60
    while not case.note(survivor, 0).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time_up = not case.note(survivor, 0).exists()
    os.kill(case.pids[case.victim], signal.SIGCONT)
    ends = [os.waitpid(pid, 0)[1] for pid in case.pids]
    return {
        "victim": case.victim,
        "at": case.at,
        "time_up": time_up,
        "ends": ends,
        "survivor": case.note(survivor, 0).read_text(),
        "stopped": case.note(case.victim, 0).read_text(),
        "next": [case.note(rank, 1).read_text() for rank in range(2)],
        "old": loaded(case.root / "old"),
        "new": [_loaded_with_component(case.root / f"new-{number}") for number in range(2)],
    }


def _loaded_with_component(path: Path) -> str:
    try:
        with dcp.open(path) as checkpoint:
            values = {float(v) for name in ("a", "b") for v in checkpoint[name][...].unique()}
    except CheckpointError as error:
        return type(error).__name__
    return str(values.pop()) if len(values) == 1 else f"a mixture: {values}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        cases = [
            start(victim, at, Path(name))
            for victim in range(2)
            for at in ("state_dict", "create", "write", "close", "stat", "publish")
            if victim == 0 or at not in ("stat", "publish")
        ]
        for one in cases:
            print(json.dumps(finish(one)), file=sys.stdout, flush=True)
