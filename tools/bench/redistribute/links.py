"""What the collectives of Gloo take by themselves: what the cost model for them is made of."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..frame.contest import race
from ..frame.team import Team
from ..frame.timing import Call

_c10d: Any = dist

SIZES = {4 << 10: (11, 8), 64 << 10: (11, 8), 1 << 20: (9, 4), 16 << 20: (5, 1)}
"""Bytes of each rank's input, with rounds, and calls in a row of a round."""
_TAG = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One collective at one size."""

    name: str
    ranks: int
    num_bytes: int
    """Of each rank's input."""
    received_bytes: int
    """What one rank receives if ranks send to each other directly."""
    times: list[float]
    """Seconds of a call by round, of the slowest rank."""

    @property
    def seconds(self) -> float:
        """Median of the rounds."""
        return median(self.times)


def measure_links(team: Team, sizes: dict[int, tuple[int, int]], rounds: int = 0) -> list[Link]:
    """Measure all collectives on all ranks, and on halves of them at once.

    ``rounds`` may be given for all sizes.
    """
    halves = [list(range(start, start + team.size // 2)) for start in (0, team.size // 2)]
    half = [dist.new_group(ranks) for ranks in halves][team.rank * 2 // team.size]
    found: list[Link] = []
    for group, ranks in ((dist.group.WORLD, team.size), (half, team.size // 2)):
        for num_bytes, (usual_rounds, calls) in sizes.items():
            team.say(f"links of {ranks} ranks, {num_bytes >> 10} KiB")
            timed = race(team, _collectives(group, num_bytes), rounds or usual_rounds, calls)
            found += [
                Link(
                    name=name,
                    ranks=ranks,
                    num_bytes=num_bytes,
                    received_bytes=int(num_bytes * share),
                    times=timed[name],
                )
                for name, share in _shares(ranks).items()
            ]
    return found


def _shares(ranks: int) -> dict[str, float]:
    """Return what a rank receives, over what it puts in."""
    others = ranks - 1
    return {
        "all-to-all": others / ranks,
        "all-to-all of copies": others,
        "all-gather": others,
        "send and receive": others / ranks,
        "all-reduce": 2 * others / ranks,
        "reduce-scatter": others / ranks,
        "broadcast": 1.0,
    }


def _collectives(group: Any, num_bytes: int) -> dict[str, Call]:
    """Return calls on memory that is there, each with an input of ``num_bytes``."""
    size, rank = group.size(), group.rank()
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    received = torch.zeros_like(sent)
    copies, gathered = sent.repeat(size), received.repeat(size)
    terms, sums = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4 // size)
    reduced = torch.zeros_like(terms)
    outgoing, incoming = sent.chunk(size), received.chunk(size)
    others = [(rank + step) % size for step in range(1, size)]

    def all_reduce() -> None:
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.SUM
        group.allreduce([reduced], options).wait()

    def reduce_scatter() -> None:
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = _c10d.ReduceOp.SUM
        group._reduce_scatter_base(sums, terms, options).wait()

    def messages() -> None:
        works = [group.recv([incoming[other]], other, _TAG) for other in others[::-1]]
        works += [group.send([outgoing[other]], other, _TAG) for other in others]
        for work in works:
            work.wait()

    return {
        "all-to-all": lambda: group.alltoall_base(received, sent, [], []).wait(),
        "all-to-all of copies": lambda: group.alltoall_base(gathered, copies, [], []).wait(),
        "all-gather": lambda: group._allgather_base(gathered, sent).wait(),
        "send and receive": messages,
        "all-reduce": all_reduce,
        "reduce-scatter": reduce_scatter,
        "broadcast": lambda: group.broadcast(received, 0).wait(),
    }
