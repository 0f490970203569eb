"""One training step of a GPT on both libraries, on the ranks of a launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

import dtckpt.dtensor.fsdp as our_fsdp
import dtckpt.dtensor.parallel as our_parallel
from dtckpt.dtensor import init_device_mesh as our_mesh

from ...demo.model import GPT, Config, make_model
from ..frame.contest import race
from ..frame.probe import measure as cost_of
from ..frame.probe import tidy
from ..frame.team import Team
from ..frame.timing import OURS, PEER, Comparison
from .ways import count_collectives

RANKS = 4
BAR = 1.0
"""The most that a step may take, over torch's."""
# Sizes that divide: torch's styles take no others.
CONFIG = Config(width=192, heads=8, hidden=768, context=64)
_ROWS, _WARM_UPS, _MEMORY_TURNS = 8, 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a model is spread over the axes of data and of the model."""

    name: str
    mesh: tuple[int, int]
    """Ranks along "dp" and "tp"."""
    prefetches: bool = False
    """Whether each block has the parameters of the next one under way."""


SPREADS = (
    Spread(name="TP", mesh=(1, 4)),
    Spread(name="FSDP", mesh=(4, 1)),
    Spread(name="FSDP, prefetched", mesh=(4, 1), prefetches=True),
    Spread(name="FSDP x TP", mesh=(2, 2)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Comparison):
    """What a step takes on both, by the slowest rank."""

    collectives: dict[str, int] = field(default_factory=dict[str, int])
    """Of one step, by system."""
    sent: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes that collectives bring to one rank in a step, by system."""
    memory: dict[str, int] = field(default_factory=dict[str, int])
    """Most memory that a step takes beyond what was there before, of the worst rank; the least of
    some steps, since what the allocator keeps varies by a tenth."""
    losses: dict[str, float] = field(default_factory=dict[str, float])
    """After as many steps."""


def measure(team: Team, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what all spreads took, on one of the ranks."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    wanted: list[str] = job["only"]
    return [
        asdict(_measure(team, spread, job["rounds"]))
        for spread in SPREADS
        if any(name in spread.name for name in wanted)
    ]


def _measure(team: Team, spread: Spread, rounds: int) -> Stepped:
    team.say(f"{spread.name}: {rounds} rounds")
    steps = {
        PEER: _step(team, spread, torch_mesh, torch_parallel, torch_fsdp),
        OURS: _step(team, spread, our_mesh, our_parallel, our_fsdp),
    }
    found = Stepped(name=spread.name, bar=BAR)
    for name, step in steps.items():
        found.collectives[name], found.sent[name] = count_collectives(step, _WARM_UPS)
    for turn in range(_MEMORY_TURNS):
        for name, step in steps.items():
            tidy()
            team.barrier()
            most = max(team.gather(cost_of(step).extra_bytes))
            found.memory[name] = min(most, found.memory[name]) if turn else most
    found.times.update(race(team, steps, rounds, 1))
    found.losses.update({name: step() for name, step in steps.items()})
    return found


def _step(
    team: Team, spread: Spread, mesh_of: Callable[..., Any], parallel: Any, fsdp: ModuleType
) -> Callable[[], float]:
    """Return what makes one step of a model of its own; it returns the loss."""
    mesh = mesh_of("cpu", spread.mesh, mesh_dim_names=("dp", "tp"))
    model: Any = make_model(0, CONFIG)
    if spread.mesh[1] > 1:
        for block in model.blocks:
            parallel.parallelize_module(block, mesh["tp"], _styles(parallel))
    if spread.mesh[0] > 1:
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh["dp"])
        fsdp.fully_shard(model, mesh=mesh["dp"])
    if spread.prefetches:
        for one, then in pairwise(model.blocks):
            one.set_modules_to_forward_prefetch([then])
            then.set_modules_to_backward_prefetch([one])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seed = team.rank // spread.mesh[1]  # ranks along "tp" have the same part of the batch
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocabulary, (_ROWS, CONFIG.context + 1), generator=generator)
    return lambda: _one_step(model, optimizer, tokens)


def _one_step(model: GPT, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    loss: torch.Tensor = nn.Module.__call__(model, tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _styles(parallel: Any) -> Mapping[str, Any]:
    columns = ("attention.query", "attention.key", "attention.value", "up")
    return {
        **{name: parallel.ColwiseParallel() for name in columns},
        **{name: parallel.RowwiseParallel() for name in ("attention.out", "down")},
    }
