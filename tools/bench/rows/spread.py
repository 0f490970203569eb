"""Saves that are spread over the training: the stall of the call, and what they cost in all."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dtckpt import checkpoint

from ..folders import fresh
from ..frame.contest import Contestant, compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..systems import line_mesh

AT_ONCE = f"{OURS}, at once"
_LAYERS = 8
_BYTES_PER_PARAMETER = 12
_BASE_STEPS = 3


class _Training:
    """Linear layers under FSDP2, and AdamW."""

    def __init__(self, team: Team, size: int) -> None:
        width = int((size / _LAYERS / _BYTES_PER_PARAMETER) ** 0.5) // 16 * 16
        mesh = line_mesh(team.size)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.group = mesh.get_group()
        self._batch = torch.ones(64, width)
        self.step()

    def step(self) -> float:
        """Train one step and return how long it took."""
        start = time.perf_counter()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    @property
    def locals(self) -> list[torch.Tensor]:
        """What this rank holds."""
        found: list[Any] = [*self.model.parameters()]
        for entry in self.optimizer.state.values():
            found += [value for value in entry.values() if isinstance(value, torch.Tensor)]
        return [v.to_local().detach() if hasattr(v, "to_local") else v for v in found]


class _Save:
    """Saves in one way, each followed by a step of the training."""

    def __init__(self, team: Team, training: _Training, name: str) -> None:
        self._training, self._spread = training, name == OURS
        self._path: Path = team.folder / name
        self._handle: checkpoint.SaveHandle | None = None
        self._base = self._stall = 0.0
        self._fresh = partial(fresh, team, self._path)
        self.notes: list[dict[str, float]] = []

    def before(self) -> None:
        """Make room, and measure steps without a save."""
        self._fresh()
        self._base = median(self._training.step() for _ in range(_BASE_STEPS))

    def start(self) -> None:
        """Save; what is measured."""
        start = time.perf_counter()
        self._handle = checkpoint.async_save(
            self._training.state,
            self._path,
            process_group=self._training.group,
            spread=self._spread,
        )
        self._stall = time.perf_counter() - start

    def after(self) -> None:
        """Train a step, in which the copies are made, and wait for the end."""
        added = self._training.step() - self._base
        self.notes.append({"base_seconds": self._base, "lost_seconds": self._stall + added})
        if self._handle is not None:
            self._handle.result()
        self._handle = None


def _run(team: Team, setting: Setting) -> Outcome:
    training = _Training(team, setting.size)
    sources = training.locals
    copies = [tensor.clone() for tensor in sources]

    def copy() -> None:
        for target, source in zip(copies, sources, strict=True):
            target.copy_(source)

    contestants = [Contestant(name="memcpy", call=copy)]
    saves = {name: _Save(team, training, name) for name in (OURS, AT_ONCE)}
    contestants += [
        Contestant(name=name, before=save.before, call=save.start, after=save.after)
        for name, save in saves.items()
    ]
    outcome = compete(team, contestants, setting.rounds)
    for name, save in saves.items():
        if name in outcome.values:
            rounds = len(outcome.values[name]["seconds"])
            notes = team.gather(save.notes[-rounds:])
            for metric in notes[0][0]:
                worst = [max(own[i][metric] for own in notes) for i in range(rounds)]
                outcome.values[name][metric] = worst
    plain = outcome.values["memcpy"]  # nothing goes on beside it
    plain["lost_seconds"] = list(plain["seconds"])
    plain["base_seconds"] = list(outcome.values[OURS]["base_seconds"])
    outcome.facts["state_bytes"] = team.size * sum(tensor.nbytes for tensor in sources)
    return outcome


SPREAD = Row(
    name="async-spread",
    title="An asynchronous save that is spread over the training",
    what=f"{_LAYERS} linear layers under torch's fully_shard, and AdamW. Stall is the call; lost "
    "is that, and what the next step, in which copies are made and writing begins, takes longer "
    "than one without a save, on the same cores. Beside it one memcpy of what each rank holds.",
    columns=(
        Column(metric="seconds", heading="stall"),
        Column(metric="seconds", heading="range", kind="range"),
        Column(metric="lost_seconds", heading="lost in all"),
        Column(metric="base_seconds", heading="a step"),
    ),
    bars=(Bar(metric="seconds", against="memcpy", limit=0.2),),
    systems=(OURS, AT_ONCE, "memcpy"),
    run=_run,
)
