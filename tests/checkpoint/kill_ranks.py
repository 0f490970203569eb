"""Ranks save; some of them are killed at a chosen storage call. Run as a program by test_kill.

Importing torch takes seconds, so this process imports it once and forks the ranks of each case. It
prints one JSON object per case: how the ranks ended and what can be loaded afterwards. Of two ranks
each is killed at every call; of four some are, which hold copies of each other's part or do not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import Layout, Mesh, Replicate, Shard
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


@contextmanager
def ending(case: Path, rank: int) -> Generator[None]:
    """End a forked rank after the block, whatever it raises: else it would go on as its parent."""
    try:
        yield
    except BaseException as error:
        (case / f"rank{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def group_of(case: Path, rank: int, size: int) -> dist.ProcessGroup:
    """Return the group of a case, once all are in it: who is killed early would break it."""
    store = c10d.FileStore(str(case / "rendezvous"), size)
    group = gloo_group(store, rank, size, timedelta(seconds=20))
    group.barrier().wait()
    return group


def run_rank(rank: int, root: Path, case: Path, kill: tuple[int, int, bool], target: str) -> None:
    """Save in a forked rank and leave a note of how it ended."""
    victim, nth, after_effect = kill
    group = group_of(case, rank, 2)
    fault: Fault = Kill(after_effect=after_effect)
    store = FaultyStore(LocalStore(root / target), [Rule(fault, nth=nth)] if rank == victim else [])
    note = "ok"
    try:
        dcp.save(state(NEW), store, process_group=group, overwrite=target == "step-1")
    except CheckpointError as error:
        note = type(error).__name__
    (case / f"rank{rank}").write_text(note)
    (case / f"calls{rank}").write_text(str(len(store.calls)))


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
                with ending(case, rank):
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


SHAPE = (12, 5)
HYBRID = Layout(Mesh((2, 2)), (Replicate(), Shard(0)), SHAPE)
SHARDED = Layout(Mesh((4,)), (Shard(0),), SHAPE)


@dataclass(frozen=True)
class Team:
    """Four ranks, some of which are killed when they have created a file."""

    name: str
    layout: Layout
    victims: tuple[int, ...]
    background: bool = False


TEAMS = (
    Team("a replica is left", HYBRID, (3,)),
    Team("a replica has copied it", HYBRID, (2,), background=True),
    Team("both replicas are killed", HYBRID, (1, 3)),
    Team("there is no replica", SHARDED, (3,)),
)


def run_member(team: Team, rank: int, root: Path, case: Path) -> None:
    """Save in a forked rank, change the tensors, and leave a note of how it ended."""
    group = group_of(case, rank, 4)
    rules = [Rule(Kill(after_effect=True), op="create")] if rank in team.victims else []
    store = FaultyStore(LocalStore(root), rules)
    at = team.layout.mesh.coordinate(rank) or ()
    box = team.layout.box(at)
    parts = {f"w{n}": torch.arange(60.0).view(SHAPE)[box.slices] + n for n in range(4)}
    value = dcp.with_layouts(
        parts | {"b": torch.ones(7)}, dict.fromkeys(parts, team.layout), rank=rank
    )
    try:
        if team.background:
            handle = dcp.async_save(value, store, process_group=group, staged_copies=2)
            for part in parts.values():
                part.zero_()
            report = handle.result(60)
        else:
            report = dcp.save(value, store, process_group=group)
        note = f"without {list(report.stood_in_for)}"
    except CheckpointError as error:
        note = f"{type(error).__name__}: {error}"
    (case / f"rank{rank}").write_text(note)


def run_team(team: Team) -> dict[str, object]:
    """Run four ranks, and say how each ended and what can be loaded."""
    with tempfile.TemporaryDirectory() as name:
        root, case = Path(name) / "run", Path(name) / "case"
        case.mkdir()
        pids: list[int] = []
        for rank in range(4):
            pid = os.fork()
            if pid == 0:
                with ending(case, rank):
                    run_member(team, rank, root, case)
            pids.append(pid)
        killed = [r for r, pid in enumerate(pids) if os.WIFSIGNALED(os.waitpid(pid, 0)[1])]
        notes = {r: (case / f"rank{r}").read_text() for r in range(4) if r not in killed}
        return {"team": team.name, "killed": killed, "notes": notes, "loaded": _loaded_whole(root)}


def _loaded_whole(root: Path) -> str:
    try:
        with dcp.open(root) as checkpoint:
            expected = {f"w{n}": torch.arange(60.0).view(SHAPE) + n for n in range(4)}
            expected["b"] = torch.ones(7)
            right = all(torch.equal(checkpoint[n][...], value) for n, value in expected.items())
    except NotCommitted:
        return "not committed"
    return "right" if right and not dcp.verify(root).problems else "wrong"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for team in TEAMS:
        print(json.dumps(run_team(team)), flush=True)
    for found in all_cases():
        print(json.dumps(asdict(found)), file=sys.stdout, flush=True)
