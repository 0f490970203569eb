"""Redistribute on real processes beside torch's DTensor; started by ``redistribute``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed.tensor as torch_tensor
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtckpt.dtensor import DeviceMesh, DTensor
from dtckpt.dtensor.comm.traffic import Collective, Observer, observing

from ..contest import race
from ..team import Team
from ..timing import OURS, PEER, Call, Comparison
from .layouts import Held, Transition, boxes_of, transitions
from .links import SIZES as LINK_SIZES
from .links import measure_links
from .planned import explained

MESHES = ((4,), (2, 2))
RANKS = 4
BAR, SHARD_TO_SHARD_BAR = 1.0, 0.5
_LOCAL_CALLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A tensor that is moved, and how often."""

    name: str
    shape: tuple[int, int]
    rounds: int
    calls: int
    """Calls in a row that a round times: where ranks wake up late, one alone is mostly that."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * torch.float32.itemsize


SIZES = (
    Size(name="small", shape=(64, 64), rounds=11, calls=8),
    Size(name="medium", shape=(512, 512), rounds=9, calls=4),
    Size(name="large", shape=(4096, 2048), rounds=5, calls=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ranks are told to do."""

    sizes: list[str]
    """Names of ``SIZES``."""
    every: int
    """Only so many-th transitions."""
    rounds: int
    """0 for those of the sizes."""
    skips_links: bool
    skips_wall: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Comparison):
    """One transition, timed by the slowest rank."""

    mesh: tuple[int, ...]
    size: str
    is_shard_to_shard: bool
    received_bytes: int
    """What all ranks together received in one of our calls, counted."""
    told_bytes: int
    """The same as ``explain`` says it."""


def measure(team: Team, job: dict[str, Any]) -> dict[str, Any]:
    """Return the links and the transitions of a job, on one of its ranks."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # Gloo falls back, many times
    wanted = Job(**job)
    sizes = _link_sizes(wanted)
    links = [] if wanted.skips_links else measure_links(team, sizes, wanted.rounds)
    return {"links": list(map(asdict, links)), "timed": list(map(asdict, _timed(team, wanted)))}


def _link_sizes(job: Job) -> dict[int, tuple[int, int]]:
    """Return the sizes of collectives up to that of the largest tensor."""
    largest = max(size.num_bytes for size in SIZES if size.name in job.sizes)
    return {size: how for size, how in LINK_SIZES.items() if size <= largest}


def _timed(team: Team, job: Job) -> list[Timed]:
    found: list[Timed] = []
    for mesh in () if job.skips_wall else MESHES:
        sides = _Sides(mesh, team.rank)
        for size in SIZES:
            if size.name in job.sizes:
                chosen = transitions(mesh, len(size.shape), partial=True)[:: job.every]
                team.say(f"{mesh}, {size.name}: {len(chosen)} transitions")
                rounds = job.rounds or size.rounds
                found += [_measure(team, sides, change, size, rounds) for change in chosen]
    return found


class _Counter(Observer):
    """Counts what reaches this rank."""

    def __init__(self) -> None:
        self.received_bytes = 0

    def issued(self, collective: Collective) -> None:
        """Count a collective."""
        self.received_bytes += collective.received_bytes


class _Sides:
    """One mesh, as torch's and as ours around it."""

    def __init__(self, mesh: tuple[int, ...], rank: int) -> None:
        names = tuple(f"axis{axis}" for axis in range(len(mesh)))
        self.rank = rank
        self.shape = mesh
        self.torch_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        self.mesh = DeviceMesh.from_torch(self.torch_mesh)

    def calls(self, change: Transition, shape: Sequence[int]) -> tuple[dict[str, Call], int]:
        """Return what is timed, by system, and the bytes that reach this rank in ours."""
        whole = (torch.arange(math.prod(shape)) % 251).to(torch.float32).view(*shape)
        local = self._part(whole, change.source)
        stride = whole.stride()
        theirs: Any = torch_tensor.DTensor.from_local(
            local.clone(),
            self.torch_mesh,
            change.source.torch_placements(),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        ours: Any = DTensor.from_local(
            local.clone(), self.mesh, change.source.placements(), shape=tuple(shape), stride=stride
        )
        to_theirs, to_ours = change.target.torch_placements(), change.target.placements()
        calls: dict[str, Call] = {
            PEER: lambda: theirs.redistribute(placements=to_theirs),
            OURS: lambda: ours.redistribute(placements=to_ours),
        }
        terms = [n for n, a in zip(self.shape, change.source.axes, strict=True) if a == "sum"]
        expected = self._part(whole, change.target) * math.prod(terms)
        counted: dict[str, int] = {}
        for name, call in calls.items():
            counter = _Counter()
            with observing([counter]):
                moved: Tensor = call().to_local()
            if not torch.equal(moved, expected):
                raise RuntimeError(f"{change}: {name} has other values")
            counted[name] = counter.received_bytes
        return calls, counted[OURS]

    def _part(self, whole: Tensor, held: Held) -> Tensor:
        box = boxes_of(held, self.shape, whole.shape)[self.rank]
        return whole[tuple(slice(int(start), int(end)) for start, end in box)].contiguous()


def _measure(team: Team, sides: _Sides, change: Transition, size: Size, rounds: int) -> Timed:
    """Return the seconds of a call in every round; the systems take turns."""
    calls, received = sides.calls(change, size.shape)
    in_a_row = size.calls
    if change.is_local(size.shape):  # which takes too little time to be timed alone
        in_a_row = max(in_a_row, _LOCAL_CALLS)
    told = explained(change, size.shape).received_bytes[team.rank]
    heard = team.gather((received, told))
    return Timed(
        name=f"{change.source} -> {change.target}",
        bar=SHARD_TO_SHARD_BAR if change.is_shard_to_shard else BAR,
        times=race(team, calls, rounds, in_a_row),
        mesh=change.mesh,
        size=size.name,
        is_shard_to_shard=change.is_shard_to_shard,
        received_bytes=sum(received for received, _ in heard),
        told_bytes=sum(told for _, told in heard),
    )
