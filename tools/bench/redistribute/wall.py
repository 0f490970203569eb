"""Redistribute on real processes beside torch's DTensor; started by ``redistribute``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtckpt.dtensor.debug import CommDebugMode

from ..distributed import both
from ..frame.contest import race
from ..frame.team import Team
from ..frame.timing import Call, Comparison
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


class _Sides:
    """One mesh, as torch's and as ours around it."""

    def __init__(self, mesh: tuple[int, ...], rank: int) -> None:
        names = tuple(f"axis{axis}" for axis in range(len(mesh)))
        self._rank, self._shape = rank, mesh
        self._libraries = both(init_device_mesh("cpu", mesh, mesh_dim_names=names))

    def calls(self, change: Transition, shape: Sequence[int]) -> tuple[dict[str, Call], int]:
        """Return what is timed, by system, and the bytes that reach this rank in ours."""
        whole = (torch.arange(math.prod(shape)) % 251).to(torch.float32).view(*shape)
        local = self._part(whole, change.source)
        terms = [n for n, a in zip(self._shape, change.source.axes, strict=True) if a == "sum"]
        expected = self._part(whole, change.target) * math.prod(terms)
        calls: dict[str, Call] = {}
        received = 0
        for library in self._libraries:
            given = library.wrap(local.clone(), shape, *change.source.axes)
            call = calls[library.name] = partial(library.move, given, *change.target.axes)
            with CommDebugMode() as seen:
                moved: Tensor = call().to_local()
            if not torch.equal(moved, expected):
                raise RuntimeError(f"{change}: {library.name} has other values")
            received = sum(seen.get_comm_bytes().values())  # of ours, which come last
        return calls, received

    def _part(self, whole: Tensor, held: Held) -> Tensor:
        box = boxes_of(held, self._shape, whole.shape)[self._rank]
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
