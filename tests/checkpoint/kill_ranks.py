"""Two ranks save; one of them is killed at a chosen storage call. Run as a program by test_kill.

Importing torch takes seconds, so this process imports it once and forks two ranks per case. It
prints one JSON object per case: how the ranks ended and what can be loaded afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import CheckpointError, NotCommitted
from dtckpt.storage import Fault, FaultyStore, Kill, LocalStore, Rule

from ..ranks import _c10d as c10d  # pyright: ignore[reportPrivateUsage]
from ..ranks import gloo_group

OLD, NEW = 1.0, 2.0


@dataclass(frozen=True)
class Outcome:
    """What one case led to."""

    victim: int
    nth: int
    after_effect: bool
    overwrite: bool
    killed: bool
    num_calls: int
    """Storage calls of the victim, where it lived to tell."""
    survivor: str
    previous: str
    new: str


def state(value: float) -> dict[str, object]:
    """A state of two tensors and some values, so that both ranks have something to write."""
    return {
        "a": torch.full((2000,), value),
        "b": torch.full((2000,), value, dtype=torch.float64),
        "step": value,
    }


def run_rank(rank: int, root: Path, case: Path, kill: tuple[int, int, bool], target: str) -> None:
    """Save in a forked rank and leave a note of how it ended."""
    victim, nth, after_effect = kill
    group = gloo_group(c10d.FileStore(str(case / "rendezvous"), 2), rank, 2, timedelta(seconds=20))
    fault: Fault = Kill(after_effect=after_effect)
    store = FaultyStore(LocalStore(root / target), [Rule(fault, nth=nth)] if rank == victim else [])
    note = "ok"
    try:
        dcp.save(state(NEW), store, process_group=group, overwrite=target == "step-1")
    except CheckpointError as error:
        note = type(error).__name__
    (case / f"rank{rank}").write_text(note)
    (case / f"calls{rank}").write_text(str(len(store.calls)))
    os._exit(0)


def loaded(path: Path) -> str:
    """Say what a load of a checkpoint gives: a value, "not committed", or something bad."""
    into = state(0.0)
    try:
        dcp.load(into, path)
    except NotCommitted:
        return "not committed"
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    values = {float(v) for t in (into["a"], into["b"]) for v in torch.as_tensor(t).unique()}
    values.add(float(str(into["step"])))
    return str(values.pop()) if len(values) == 1 else f"a mixture: {values}"


def run_case(victim: int, nth: int, *, after_effect: bool, overwrite: bool) -> Outcome:
    """Run one case in a directory of its own."""
    with tempfile.TemporaryDirectory() as name:
        root, case = Path(name) / "run", Path(name) / "case"
        case.mkdir()
        dcp.save(state(OLD), root / "step-1")
        target = "step-1" if overwrite else "step-2"
        pids: list[int] = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                run_rank(rank, root, case, (victim, nth, after_effect), target)
            pids.append(pid)
        ends = [os.waitpid(pid, 0)[1] for pid in pids]
        survivor, calls = case / f"rank{1 - victim}", case / f"calls{victim}"
        return Outcome(
            victim=victim,
            nth=nth,
            after_effect=after_effect,
            overwrite=overwrite,
            killed=os.WIFSIGNALED(ends[victim]),
            num_calls=int(calls.read_text()) if calls.exists() else 0,
            survivor=survivor.read_text() if survivor.exists() else "no note",
            previous=loaded(root / "step-1"),
            new=loaded(root / target),
        )


def all_cases() -> Iterator[Outcome]:
    """Kill either rank before and after each of its storage calls, until a save survives."""
    for victim in range(2):
        for overwrite in (False, True):
            for after_effect in (False, True):
                for nth in range(1, 40):
                    outcome = run_case(victim, nth, after_effect=after_effect, overwrite=overwrite)
                    yield outcome
                    if not outcome.killed and nth > outcome.num_calls:
                        break


if __name__ == "__main__":
    torch.set_num_threads(1)
    for found in all_cases():
        print(json.dumps(asdict(found)), file=sys.stdout, flush=True)
