"""Asynchronous saves: how long the call blocks, and what the background costs the training."""

from __future__ import annotations

import time
from functools import partial

import torch

from ..folders import fresh
from ..frame.contest import Contestant, compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers import dcp, ours
from ..peers.base import Pending, StartSave
from ..state import ShardedState
from ..systems import sharded_state

_STARTERS: dict[str, StartSave] = {OURS: ours.start_save, "DCP": dcp.start_save}
_BASE_SECONDS = 1.0
"""How long the speed of training without a save is measured before each save."""
_BASE_BYTES = 64 << 20
"""For states smaller than this it is measured for less long."""


class _Background:
    """Saves of one system in the background, one at a time."""

    def __init__(self, team: Team, state: ShardedState, name: str) -> None:
        self._state, self._path = state, team.folder / name
        self._begin = _STARTERS[name]
        self._pending: Pending | None = None
        self.fresh = partial(fresh, team, self._path)

    def start(self) -> Pending:
        self._pending = self._begin(self._state, self._path)
        return self._pending

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
        self._pending = None


def _run_stall(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    sources = list(state.locals.values())
    copies = [tensor.clone() for tensor in sources]

    def copy() -> None:
        for target, source in zip(copies, sources, strict=True):
            target.copy_(source)

    contestants = [Contestant(name="memcpy", call=copy)]
    for name in _STARTERS:
        save = _Background(team, state, name)
        contestants.append(
            Contestant(name=name, before=save.fresh, call=save.start, after=save.wait)
        )
    outcome = compete(team, contestants, setting.rounds)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


class _Training:
    """A loop of small steps: an MLP forward and backward, and some work in Python."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
        )
        self._batch = torch.ones(32, 256)
        self.checksum = 0

    def step(self) -> None:
        self._model.zero_grad()
        self._model(self._batch).square().mean().backward()
        statistics = {str(i): i * i for i in range(500)}
        self.checksum = sum(statistics.values())

    def rate(self, seconds: float) -> float:
        """Return steps per second, measured for so long."""
        steps, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            self.step()
            steps += 1
        return steps / passed


class _Busy:
    """Trains through saves of one system and notes what they cost."""

    def __init__(self, training: _Training, save: _Background, base_seconds: float) -> None:
        self._training, self._save, self._base_seconds = training, save, base_seconds
        self.notes: list[dict[str, float]] = []

    def run(self) -> None:
        rate = self._training.rate(self._base_seconds)
        start = time.perf_counter()
        pending = self._save.start()
        returned = time.perf_counter()
        steps = 0
        while not steps or not pending.done():
            self._training.step()
            steps += 1
        end = time.perf_counter()
        note = {
            "slowdown": rate * (end - returned) / steps,
            "background_seconds": end - returned,
            "lost_seconds": end - start - steps / rate,
        }
        self.notes.append(note)


def _run_busy(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    training = _Training()
    loops: dict[str, _Busy] = {}
    contestants: list[Contestant] = []
    for name in _STARTERS:
        save = _Background(team, state, name)
        loops[name] = _Busy(training, save, min(_BASE_SECONDS, setting.size / _BASE_BYTES))
        contestants.append(
            Contestant(name=name, before=save.fresh, call=loops[name].run, after=save.wait)
        )
    outcome = compete(team, contestants, setting.rounds)
    for name, values in outcome.values.items():
        rounds = len(values["seconds"])
        notes = team.gather(loops[name].notes[-rounds:])
        for metric in notes[0][0]:
            values[metric] = [max(own[i][metric] for own in notes) for i in range(rounds)]
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


STALL = Row(
    name="async-stall",
    title="Time until an asynchronous save returns",
    what="State in host memory. Beside it one memcpy of the bytes that each rank owns, into memory "
    "that is there. Ours keeps its staging memory from save to save, so the round that warms up "
    "has paid for it; DCP takes it anew every time.",
    columns=(
        Column(metric="seconds", heading="stall"),
        Column(metric="seconds", heading="range", kind="range"),
        Column(metric="extra_bytes", heading="extra memory", kind="bytes"),
    ),
    bars=(Bar(metric="seconds", against="memcpy", limit=1.2),),
    systems=(OURS, "DCP", "memcpy"),
    run=_run_stall,
)

BUSY = Row(
    name="async-training",
    title="Training while a save runs in the background",
    what="A small MLP and some work in Python, one thread per rank. Slowdown is the time of a step "
    "during the background phase over that of a step without a save; lost is the training time "
    "that one save costs in all, the stall included.",
    columns=(
        Column(metric="slowdown", heading="slowdown", kind="ratio"),
        Column(metric="background_seconds", heading="background"),
        Column(metric="lost_seconds", heading="lost per save"),
    ),
    bars=(),
    systems=(OURS, "DCP"),
    run=_run_busy,
)
