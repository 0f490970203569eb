"""Exceptions where they really come from: callbacks, arguments, memory and storage of one rank."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.errors import RankFailed
from dtckpt.storage import FaultyStore, MemoryStore, RaiseError, Rule, Store
from dtckpt.storage.arena import Arena

from ..ranks import run_ranks
from .failures import KINDS, SIZE, Case, assert_told_alike

SOME = ["ordinary", "unprintable", "derived", "interrupt", "exit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """Where one rank fails, and with what."""

    point: str
    victim: int
    kind: str
    error: BaseException

    def spring(self, *_: object, **__: object) -> Any:
        raise self.error


@dataclass(frozen=True, slots=True)
class Component:
    """Part of a state that may fail to give or to take its state dict."""

    trap: Trap | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.trap is not None and self.trap.point == "state_dict":
            self.trap.spring()
        return {"x": 1.0}

    def load_state_dict(self, _: object) -> None:
        if self.trap is not None and self.trap.point == "load_state_dict":
            self.trap.spring()


@dataclass(frozen=True, slots=True)
class Place(os.PathLike[str]):
    """A path that cannot be had."""

    trap: Trap

    def __fspath__(self) -> str:
        return self.trap.spring()


class Pieces:
    """A tensor that cannot say what it consists of."""

    def __init__(self, trap: Trap) -> None:
        self.__create_chunk_list__ = self.__get_tensor_shard__ = trap.spring


def state(value: float, trap: Trap | None = None) -> dict[str, Any]:
    tensors: dict[str, Any] = {f"t{i}": torch.full((50,), value) for i in range(2 * SIZE)}
    if trap is not None and trap.point == "chunks":
        tensors["t1"] = Pieces(trap)
    return {"model": tensors, "part": Component(trap), "step": value}


def faulty(store: Store, trap: Trap, op: str, name: str = "*", nth: int | None = None) -> Store:
    return FaultyStore(store, [Rule(RaiseError(trap.error), op=op, name=name, nth=nth)])


SAVE_POINTS = {
    "state_dict": "save: plan",
    "open": "save: plan",
    "chunks": "save: plan",
    "stat": "save: plan",
    "base": "save: plan",
    "base_read": "save: read base",
    "base_list": "save: read base",
    "arena": "save: write",
    "create": "save: write",
    "write": "save: write",
    "close": "save: write",
    "list": "save: write",
    "publish": "save: commit",
}
LOAD_POINTS = {
    "open": "load: read manifest",
    "manifest": "load: read manifest",
    "state_dict": "load: plan",
    "header": "load: plan",
    "data": "load: read",
    "load_state_dict": "load: restore",
}
COORDINATORS = {"stat", "base_read", "base_list", "list", "publish", "manifest"}
"""What the coordinator alone does."""


def traps(points: dict[str, str]) -> Iterator[list[Trap]]:
    """Yield, point by point, what can go wrong there."""
    for point in points:
        yield [
            Trap(point=point, victim=victim, kind=kind, error=KINDS[kind][0]())
            for victim in range(1 if point in COORDINATORS else SIZE)
            for kind in SOME
        ]


Errors = dict[int, BaseException | None]


class Attempts:
    """What became of every trap."""

    def __init__(self) -> None:
        self.meeting = threading.Barrier(SIZE, timeout=30)
        self.errors: Errors = {}
        self.findings: list[tuple[Trap, Errors, list[str]]] = []

    def make(self, rank: int, trap: Trap, action: Callable[[], object], store: Store) -> None:
        """Take an action that fails on all ranks, and keep the errors and what is stored then."""
        self.errors[rank] = None
        try:
            action()
        except BaseException as error:
            self.errors[rank] = error
        if self.meeting.wait() == 0:
            left = [info.name for info in store.list()]
            self.findings.append((trap, dict(self.errors), left))
        self.meeting.wait()


def check(phase: str, trap: Trap, errors: Errors) -> None:
    case = Case(phase=phase, number=0, victim=trap.victim, kind=trap.kind)
    assert_told_alike(case, errors, trap.error)


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_save_that_fails_leaves_nothing_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    root, attempts = MemoryStore(), Attempts()
    points = {p: phase for p, phase in SAVE_POINTS.items() if background or p != "arena"}
    without_memory: dict[threading.Thread, Trap] = {}

    def arena(size: int) -> Arena:
        trap = without_memory.get(threading.current_thread())
        return Arena(size) if trap is None else trap.spring()

    monkeypatch.setattr("dtckpt.checkpoint.staging.area.Arena", arena)
    dcp.save(state(0.0), root.substore("earlier"), no_dist=True)

    def save(group: Any, place: Store, trap: Trap | None) -> None:
        target: Any = place
        base: Any = root.substore("earlier")
        if trap is not None:
            base = Place(trap) if trap.point == "base" else base
            # The base is reached through the target, beside which it lies.
            op, name = trap.point.removeprefix("base_"), "*"
            if op != trap.point:
                name = "earlier/*"
            elif op == "list":
                name = "data/*"
            target = Place(trap) if trap.point == "open" else faulty(place, trap, op, name)
        content = state(1.0, trap)
        if background:
            dcp.async_save(content, target, process_group=group, base=base).result(30)
        else:
            dcp.save(content, target, process_group=group, base=base)

    def body(rank: int, group: Any) -> None:
        for round_of_traps in found:
            place = root.substore(round_of_traps[0].point)
            for trap in round_of_traps:
                mine = trap if rank == trap.victim else None
                if mine is not None and trap.point == "arena":
                    without_memory[threading.current_thread()] = trap
                    members_of(group).memory["staging"].take()  # so that there is none to reuse
                attempts.make(rank, trap, lambda m=mine, p=place: save(group, p, m), place)
                without_memory.pop(threading.current_thread(), None)
            save(group, place, None)

    found = list(traps(points))
    run_ranks(SIZE, body, timeout=timedelta(seconds=10))
    assert {trap.point for trap, *_ in attempts.findings} == set(points)
    for trap, errors, left in attempts.findings:
        check(points[trap.point], trap, errors)
        if trap.point == "publish":  # which may have gone through, so the data files stay
            assert "manifest.json" not in left
        else:
            assert left == [], trap
    for point in points:
        assert dcp.open(root.substore(point))["model/t1"][...].tolist() == [1.0] * 50


@pytest.mark.parametrize("place", ["saving.job.in_file_order", "saving.agreeing.assign_writers"])
def test_what_fails_between_two_phases_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    root = MemoryStore()
    sprung: dict[threading.Thread, Trap] = {}
    module, _, name = place.rpartition(".")
    real = getattr(importlib.import_module(f"dtckpt.checkpoint.{module}"), name)

    def work(*args: Any) -> Any:
        trap = sprung.get(threading.current_thread())
        return real(*args) if trap is None else trap.spring()

    monkeypatch.setattr(f"dtckpt.checkpoint.{place}", work)
    attempts = Attempts()
    found = [trap for traps_here in traps({place: ""}) for trap in traps_here]

    def body(rank: int, group: Any) -> None:
        for number, trap in enumerate(found):
            store = root.substore(f"{number}")
            content = {f"t{i}": torch.ones(number + 1) for i in range(SIZE)}  # no plan is known
            if rank == trap.victim:
                sprung[threading.current_thread()] = trap
            save = functools.partial(dcp.save, content, store, process_group=group)
            attempts.make(rank, trap, save, store)
            sprung.pop(threading.current_thread(), None)
        dcp.save(state(1.0), root.substore("next"), process_group=group)

    run_ranks(SIZE, body, timeout=timedelta(seconds=10))
    for trap, errors, left in attempts.findings:
        assert errors.pop(trap.victim) is trap.error
        assert {type(error) for error in errors.values()} == {RankFailed}, trap
        for error in errors.values():
            assert f"it has given up: {type(trap.error).__name__}: " in str(error)
        assert "manifest.json" not in left
        assert left == [] or trap.victim == 0  # without a coordinator, files are left as they are
    assert dcp.open(root.substore("next"))["model/t1"][...].tolist() == [1.0] * 50


def test_a_load_that_fails_on_one_rank_fails_on_all_and_the_next_one_works() -> None:
    root, attempts = MemoryStore(), Attempts()
    ops = {
        "manifest": ("read", "manifest.json", None),
        "header": ("read_into", "data/*", 1),
        "data": ("read_into", "data/*", SIZE + 1),  # once every file is open
    }

    def load(group: Any, into: dict[str, Any], trap: Trap | None) -> None:
        target: Any = root
        if trap is not None and trap.point == "open":
            target = Place(trap)
        elif trap is not None and trap.point in ops:
            target = faulty(root, trap, *ops[trap.point])
        dcp.load(into, target, process_group=group)

    def body(rank: int, group: Any) -> None:
        dcp.save(state(1.0), root, process_group=group)
        for round_of_traps in found:
            for trap in round_of_traps:
                mine = trap if rank == trap.victim else None
                into = state(0.0, mine)
                attempts.make(rank, trap, lambda i=into, m=mine: load(group, i, m), root)
                changed = any(tensor.any() for tensor in into["model"].values())
                early = LOAD_POINTS[trap.point] in ("load: read manifest", "load: plan")
                assert not (early and changed), trap
            into = state(0.0)
            load(group, into, None)
            assert into["model"]["t5"].tolist() == [1.0] * 50

    found = list(traps(LOAD_POINTS))
    run_ranks(SIZE, body, timeout=timedelta(seconds=10))
    assert {trap.point for trap, *_ in attempts.findings} == set(LOAD_POINTS)
    for trap, errors, _ in attempts.findings:
        check(LOAD_POINTS[trap.point], trap, errors)
