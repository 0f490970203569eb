"""An exception of every kind at every phase on every rank: all raise alike, and all goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard
from dtckpt.storage import MemoryStore, Store

from ..dtensor.rank_meshes import rank_mesh
from ..ranks import run_ranks
from .failures import KINDS, SIZE, Case, Errors, Moment, Sabotage, assert_told_alike

_c10d: Any = dist

Snapshot = dict[str, bytes]


class Counter:
    """An object with a state of its own, in the handing over of which users take part."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def state(
    mesh: DeviceMesh, rank: int, value: float, dim: int = 0, stages: Iterable[int] | None = None
) -> dict[str, Any]:
    """A state that takes a save or load through all its phases.

    One tensor is cut along ``dim``; of the stages of a pipeline a rank has its own by default.
    """
    own = {f"stage{i}": {"w": torch.full((6,), value), "n": value} for i in stages or [rank]}
    local = torch.full((10, 2) if dim else (4 if rank < 2 else 2, 6), value)
    return {
        "plain": torch.full((40,), value),
        "sharded": DTensor.from_local(local, mesh, [Shard(dim)], shape=(10, 6)),
        "replicated": DTensor.from_local(torch.full((9, 5), value), mesh, [Replicate()]),
        "rng": dcp.PerRank({"seed": value + rank, "words": torch.full((3,), value)}),
        "step": value,
        "counter": Counter(value),
    } | own


def values(state: dict[str, Any], rank: int) -> set[float]:
    """All numbers in a state, those of this rank alone reduced to what all have in common."""
    stage, own = state[f"stage{rank}"], state["rng"].value
    tensors = [state["plain"], state["sharded"].to_local(), state["replicated"].to_local()]
    tensors += [stage["w"], own["words"]]
    numbers = [float(x) for tensor in tensors for x in tensor.unique()]
    return {*numbers, own["seed"] - rank, stage["n"], state["step"], state["counter"].value}


class Run:
    """Ranks that fail in one way after the other, over the same group and the same store."""

    def __init__(self, sabotage: Sabotage, store: MemoryStore) -> None:
        self.sabotage = sabotage
        self.store = store
        self.meeting = threading.Barrier(SIZE, timeout=30)
        self.errors: dict[int, BaseException | None] = {}
        self.findings: list[tuple[Case, Errors, BaseException | None, Snapshot]] = []

    def snapshot(self) -> Snapshot:
        return {info.name: self.store.read(info.name) for info in self.store.list()}

    def phases(self, rank: int, action: Callable[[], object]) -> list[str]:
        """Return the phases of an action that all ranks take and that succeeds."""
        self.sabotage.arm(rank, None)
        action()
        return self.sabotage.phases[rank]

    def fail(self, rank: int, case: Case, action: Callable[[], object]) -> None:
        """Have the ranks take an action that one of them fails in, and keep what comes of it."""
        self.sabotage.arm(rank, case)
        self.errors[rank] = None
        try:
            action()
        except BaseException as error:
            self.errors[rank] = error
        if self.meeting.wait() == 0:
            raised = self.sabotage.raised.get(case.victim)
            self.findings.append((case, dict(self.errors), raised, self.snapshot()))
        self.meeting.wait()


def cases(
    phases: list[str], wanted: list[str], moment: Moment, kinds: list[str]
) -> Iterator[list[Case]]:
    """Yield, phase by phase of those that are wanted, what can go wrong in it."""
    for number, phase in enumerate(phases):
        if phase not in wanted:
            continue
        yield [
            Case(phase=phase, number=number, victim=victim, kind=kind, moment=moment)
            for victim in range(1 if moment == "decision" else SIZE)
            for kind in kinds
        ]


ALL = list(KINDS)
SOME = ["ordinary", "derived", "interrupt"]
MOMENTS = [("instead", ALL), ("afterwards", SOME), ("decision", SOME)]

SAVE_PHASES = [
    "save: plan",
    "save: compare",
    "save: agree",
    "save: values of each rank",
    "save: compare copies",
    "save: read base",
    "save: read base",
    "save: write",
    "save: commit",
]


@pytest.mark.parametrize(("moment", "kinds"), MOMENTS, ids=[moment for moment, _ in MOMENTS])
@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_save_fails_on_all_ranks_and_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, background: bool, moment: Moment, kinds: list[str]
) -> None:
    run = Run(Sabotage(monkeypatch), MemoryStore())
    base, target = run.store.substore("step-1"), run.store.substore("step-2")
    hub = _c10d.HashStore()
    before: list[Snapshot] = []

    def save(group: Any, content: dict[str, Any], base: Store | None) -> None:
        options: dict[str, Any] = {
            "process_group": group,
            "overwrite": True,
            "check_replicas": "error",
            "base": base,
        }
        if background:
            dcp.async_save(content, target, **options).result(30)
        else:
            dcp.save(content, target, **options)

    def body(rank: int, group: Any) -> None:
        mesh = rank_mesh(hub, (SIZE,), rank, group)
        run.sabotage.arm(rank, None)
        dcp.save(state(mesh, rank, 0.0), base, process_group=group)
        good = state(mesh, rank, 1.0)
        phases = run.phases(rank, lambda: save(group, good, base))
        for value, round_of_cases in enumerate(cases(phases, phases, moment, kinds), start=2):
            new = state(mesh, rank, float(value))
            for case in round_of_cases:
                if run.meeting.wait() == 0:
                    before.append(run.snapshot())
                run.fail(rank, case, lambda new=new: save(group, new, base))
            into = state(mesh, rank, -1.0)
            run.sabotage.arm(rank, None)
            dcp.load(into, target, process_group=group)
            assert values(into, rank) == {value - 1.0}, "what was there still loads"
            run.phases(rank, lambda new=new: save(group, new, base))
            dcp.load(into, target, process_group=group)
            assert values(into, rank) == {float(value)}, "and the next save works"

    run_ranks(SIZE, body, timeout=timedelta(seconds=10))
    assert list(dict.fromkeys(case.phase for case, *_ in run.findings)) == list(
        dict.fromkeys(SAVE_PHASES)
    )
    for was, (case, errors, raised, now) in zip(before, run.findings, strict=True):
        assert_told_alike(case, errors, raised)
        if case.phase == "save: commit":  # whose failure leaves it open whether it went through
            now = {name: now[name] for name in was}
        assert now == was, case


EARLY_PHASES = ["load: read manifest", "load: plan", "load: check"]
LOAD_PHASES = ["load: read manifest", "load: plan", "load: read", "load: restore"]
SHARED_PHASES = ["load: check", "load: read", "load: send to replicas", "load: exchange"]


@pytest.mark.parametrize(("moment", "kinds"), MOMENTS, ids=[moment for moment, _ in MOMENTS])
@pytest.mark.parametrize("read_once", [False, True], ids=["each", "read once"])
def test_a_load_fails_on_all_ranks_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch, read_once: bool, moment: Moment, kinds: list[str]
) -> None:
    run = Run(Sabotage(monkeypatch), MemoryStore())
    hub = _c10d.HashStore()
    changed: dict[Case, list[bool]] = {}
    wanted = SHARED_PHASES if read_once else LOAD_PHASES
    if read_once and moment == "instead":
        # In a broadcast the others would wait for whoever does not come.
        wanted = [wanted[0], wanted[-1]]
    stages = range(SIZE) if read_once else None

    def load(group: Any, into: dict[str, Any]) -> None:
        dcp.load(into, run.store, process_group=group, read_once=read_once)

    def body(rank: int, group: Any) -> None:
        mesh = rank_mesh(hub, (SIZE,), rank, group)
        run.sabotage.arm(rank, None)
        dcp.save(state(mesh, rank, 1.0), run.store, process_group=group)
        into = state(mesh, rank, -1.0, dim=1, stages=stages)
        phases = run.phases(rank, lambda: load(group, into))
        assert set(phases) == {*LOAD_PHASES, *(SHARED_PHASES if read_once else ())}
        for round_of_cases in cases(phases, wanted, moment, kinds):
            for case in round_of_cases:
                into = state(mesh, rank, -1.0, dim=1, stages=stages)
                run.fail(rank, case, lambda into=into: load(group, into))
                changed.setdefault(case, []).append(values(into, rank) != {-1.0})
            run.phases(rank, lambda into=into: load(group, into))
            assert values(into, rank) == {1.0}

    run_ranks(SIZE, body, timeout=timedelta(seconds=10))
    assert list(dict.fromkeys(case.phase for case, *_ in run.findings)) == wanted
    for case, errors, raised, _ in run.findings:
        assert_told_alike(case, errors, raised)
        if case.phase in EARLY_PHASES:
            assert not any(changed[case]), f"{case}: a destination was changed"
            assert "overwritten" not in str(errors[0])
