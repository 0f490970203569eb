"""Two jobs of two ranks each save to one path at the same time. Run as a program by its test.

Ranks are forked, since importing torch takes seconds. Both jobs commit at the same moment: their
coordinators wait for each other before they publish. Prints one JSON object per round.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import CheckpointError
from dtckpt.storage import Fault, FaultyStore, LocalStore, Rule

from ..ranks import _c10d as c10d  # pyright: ignore[reportPrivateUsage]
from ..ranks import gloo_group

RANKS = 2
JOBS = 2
ROUNDS = 6


class Meeting(Fault):
    """Has the coordinators of all jobs wait for each other."""

    def __init__(self, barrier: Any) -> None:
        self._barrier = barrier

    def before(self) -> None:
        self._barrier.wait(20)


@dataclass(frozen=True)
class Outcome:
    """How one round ended."""

    overwrite: bool
    background: bool
    notes: list[list[str]]
    """By job and rank: "ok" or the type of the error."""
    values: list[float]
    """All values of the checkpoint that is there, the smallest first."""
    num_problems: int
    data_files: list[int]
    """How many data files are left, of the checkpoint that is there and others."""


def state(value: float) -> dict[str, torch.Tensor]:
    """A state of which both ranks write a part."""
    return {f"t{i}": torch.full((3000,), value) for i in range(4)}


def run_rank(job: int, rank: int, place: Path, case: Path, options: dict[str, Any]) -> None:
    """Save in a forked rank and leave a note of how it ended."""
    rendezvous = c10d.FileStore(str(case / f"rendezvous{job}"), RANKS)
    group = gloo_group(rendezvous, rank, RANKS, timedelta(seconds=20))
    barrier, background = options["barrier"], options["background"]
    store = FaultyStore(LocalStore(place), [Rule(Meeting(barrier), op="publish")])
    note = "ok"
    try:
        if background:
            handle = dcp.async_save(
                state(job + 1.0), store, process_group=group, overwrite=options["overwrite"]
            )
            handle.result(30)
        else:
            dcp.save(state(job + 1.0), store, process_group=group, overwrite=options["overwrite"])
    except CheckpointError as error:
        note = type(error).__name__
    (case / f"job{job}rank{rank}").write_text(note)
    os._exit(0)


def run_round(*, overwrite: bool, background: bool) -> Outcome:
    """Let the jobs compete once in a directory of their own."""
    with tempfile.TemporaryDirectory() as name:
        place, case = Path(name) / "step-1", Path(name)
        if overwrite:
            dcp.save(state(0.5), place)
        options = {
            "barrier": multiprocessing.get_context("fork").Barrier(JOBS),
            "overwrite": overwrite,
            "background": background,
        }
        pids: list[int] = []
        for job in range(JOBS):
            for rank in range(RANKS):
                pid = os.fork()
                if pid == 0:
                    run_rank(job, rank, place, case, options)
                pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        notes = [
            [(case / f"job{job}rank{rank}").read_text() for rank in range(RANKS)]
            for job in range(JOBS)
        ]
        return Outcome(
            overwrite=overwrite, background=background, notes=notes, **look(LocalStore(place))
        )


def look(store: LocalStore) -> dict[str, Any]:
    """Say what is there."""
    with dcp.open(store) as checkpoint:
        values = {float(x) for name in checkpoint for x in checkpoint[name][...].unique()}
    manifest = dcp.read_manifest(store)
    own = {manifest.path_of(record) for record in manifest.files}
    found = {info.name for info in store.list("data")}
    return {
        "values": sorted(values),
        "num_problems": len(dcp.verify(store).problems),
        "data_files": [len(found & own), len(found - own)],
    }


def all_rounds() -> Iterator[Outcome]:
    """Compete with and without leave to overwrite."""
    for number in range(ROUNDS):
        for overwrite in (False, True):
            yield run_round(overwrite=overwrite, background=number % 2 == 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for found in all_rounds():
        print(json.dumps(asdict(found)), flush=True)
