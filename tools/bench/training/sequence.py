"""What attention over a sequence that ranks share costs each of them, beside one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from dtckpt.dtensor import HeadTail, Shard, SplitPlacement, distribute_tensor, init_device_mesh
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.experimental.attention import context_parallel_attention

from ..frame.probe import measure as cost_of
from ..frame.probe import tidy
from ..frame.team import Team
from .steps import RANKS

POSITIONS = 8192
_SHAPE = (1, 4, POSITIONS, 64)
_WARM_UPS = 1

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One way to compute causal attention, forward and backward."""

    name: str
    cpu: list[float] = field(default_factory=list[float])
    """Seconds of processor time, one a round, of the rank that takes most."""
    received: int
    """Bytes that collectives bring to one rank, the one that gets most."""
    memory: int
    """Most memory that it takes beyond what was there before, of the worst rank."""

    @property
    def seconds(self) -> float:
        """The least processor time."""
        return min(self.cpu)


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
    told: dict[str, Shared] = {}
    for name, step in steps.items():
        for _ in range(_WARM_UPS):
            step()
        with CommDebugMode() as comm:
            step()
        tidy()
        team.barrier()
        told[name] = Shared(
            name=name,
            received=max(team.gather(sum(comm.get_comm_bytes().values()))),
            memory=max(team.gather(cost_of(step).extra_bytes)),
        )
    for _ in range(job["rounds"]):
        for name, step in steps.items():
            team.barrier()
            told[name].cpu.append(max(team.gather(cost_of(step).cpu_seconds)))
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
