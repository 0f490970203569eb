"""What steps cost that have the same bits on any mesh, and that they have."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, DTensor, init_device_mesh
from dtckpt.dtensor.elastic import ElasticSampler, ElasticSteps
from dtckpt.dtensor.fsdp import fully_shard

from ...demo.model import make_model
from ..frame.contest import race
from ..frame.team import Team
from .steps import CONFIG, RANKS
from .ways import Step, Way, measure_ways

ROWS = 8
"""Of each rank."""
_WARM_UPS = 3
_BATCH = 12
"""Of the training that changes its mesh: it does not divide by 5, nor by 8."""
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """All ways, and whether a training that changed its mesh has the bits of one that did not."""

    ways: list[Way]
    is_same: bool


def measure_elastic(team: Team, job: dict[str, Any]) -> dict[str, Any]:
    """Return what all ways took, on one of the ranks."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    team.say(f"elastic steps: {job['rounds']} rounds")
    torch.use_deterministic_algorithms(True)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False
    steps = {
        "ordinary, 8 rows a pass": _ordinary(passes=1),
        "elastic, 8 rows a group": _elastic(group=ROWS),
        "ordinary, 1 row a pass": _ordinary(passes=ROWS),
        "elastic, 1 row a group": _elastic(group=1),
        "elastic, 1 row a group, parameters kept": _elastic(group=1, keeps=True),
    }
    told = measure_ways(team, steps, _WARM_UPS)
    for name, times in race(team, steps, job["rounds"], 1).items():
        told[name].times.extend(times)
    is_same = _is_same_after_changes(team, job["steps"])
    return asdict(Elastic(ways=list(told.values()), is_same=is_same))


def _model(mesh: DeviceMesh, *, keeps: bool = False) -> Any:
    model: Any = make_model(_SEED, CONFIG)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
    fully_shard(model, mesh=mesh)
    if keeps:
        model.set_reshard_after_backward(False)
    return model


def _tokens(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(CONFIG.vocabulary, (rows, CONFIG.context + 1), generator=generator)


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


def _ordinary(passes: int) -> Step:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = _model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = _tokens(ROWS * RANKS).chunk(RANKS)[mesh.get_local_rank()]

    def step() -> None:
        for part in own.chunk(passes):
            (_loss(model, part) / passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _elastic(group: int, *, keeps: bool = False) -> Step:
    model = _model(init_device_mesh("cpu", (RANKS,)), keeps=keeps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = ElasticSteps(model, optimizer, seed=_SEED, group=group)
    batch = _tokens(ROWS * RANKS)
    return lambda: _step(steps, model, optimizer, batch)


def _step(
    steps: ElasticSteps, model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> float:
    with steps.step(batch) as parts:
        for part in parts:
            steps.backward(_loss(model, part))
        steps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return steps.mean_loss()


def _is_same_after_changes(team: Team, steps: int) -> bool:
    """Whether steps on 4 ranks are half of them on 4, a quarter on 2 and the rest on 3."""
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 3, 2)}
    team.say(f"elastic steps: {steps} on 4 ranks, and on 4, 2 and 3")
    whole = _train(meshes[4], steps, None, team.folder / "whole")
    stages = [(4, steps // 2), (2, steps // 4), (3, steps - steps // 2 - steps // 4)]
    found: list[float] = []
    tensors: list[torch.Tensor] = []
    source: Path | None = None
    for size, count in stages:
        target = team.folder / f"{size}-ranks"
        if team.rank < size:
            losses, tensors = _train(meshes[size], count, source, target)
            found += losses
        source = target
        team.barrier()
    wanted = whole[1]
    is_same = (found, len(tensors)) == (whole[0], len(wanted)) and all(
        torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True)
    )
    return team.gather(is_same)[0]


def _train(
    mesh: DeviceMesh, count: int, source: Path | None, target: Path
) -> tuple[list[float], list[torch.Tensor]]:
    """Take steps from one checkpoint to the next; return losses, weights and optimizer state."""
    model = _model(mesh)
    for block in model.blocks:
        block.up.register_forward_hook(_dropped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = ElasticSteps(model, optimizer, seed=_SEED)
    data = _tokens(50)
    sampler = ElasticSampler(len(data), seed=_SEED)
    state = {"model": model, "optimizer": optimizer, "steps": steps, "sampler": sampler}
    if source is not None:
        ckpt.load(state, source, process_group=mesh.get_group())
    losses = [_step(steps, model, optimizer, data[sampler.next(_BATCH)]) for _ in range(count)]
    ckpt.save(state, target, process_group=mesh.get_group())
    found = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return losses, [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach() for one in found
    ]


def _dropped(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(output, 0.1)
