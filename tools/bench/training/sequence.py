"""What attention over a sequence that ranks share costs each of them, beside one device."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

from dtckpt.dtensor import HeadTail, Shard, SplitPlacement, distribute_tensor, init_device_mesh
from dtckpt.dtensor.experimental.attention import context_parallel_attention

from ..frame.probe import measure as cost_of
from ..frame.team import Team
from .steps import RANKS
from .ways import Step, measure_ways

POSITIONS = 8192
_SHAPE = (1, 4, POSITIONS, 64)
_WARM_UPS = 1


def measure_sequence(team: Team, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what all ways took, on one of the ranks."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    team.say(f"attention: {job['rounds']} rounds")
    steps: dict[str, Step] = {
        "one device": _alone(team),
        "ring, HeadTail": _shared(HeadTail(2), "ring"),
        "ring, Shard": _shared(Shard(2), "ring"),
        "alltoall, HeadTail": _shared(HeadTail(2), "alltoall"),
        "allgather, HeadTail": _shared(HeadTail(2), "allgather"),
    }
    told = measure_ways(team, steps, _WARM_UPS)
    for _ in range(job["rounds"]):
        for name, step in steps.items():
            team.barrier()
            told[name].times.append(max(team.gather(cost_of(step).cpu_seconds)))
    return [asdict(one) for one in told.values()]


def _whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(_SHAPE, generator=generator) for _ in range(4)]


def _alone(team: Team) -> Step:
    query, key, value, grad = _whole()
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]

    def step() -> None:
        if team.rank:
            return
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, leaves, grad)

    return step


def _shared(placement: SplitPlacement, method: Any) -> Step:
    mesh = init_device_mesh("cpu", (RANKS,))
    *leaves, grad = (distribute_tensor(tensor, mesh, [placement]) for tensor in _whole())
    query, key, value = (leaf.requires_grad_() for leaf in leaves)

    def step() -> None:
        out = context_parallel_attention(query, key, value, is_causal=True, rotate_method=method)
        torch.autograd.grad(out, (query, key, value), grad)

    return step
