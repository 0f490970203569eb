"""What ways to do one thing cost the ranks that do it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dtckpt.dtensor.debug import CommDebugMode

from ..frame.probe import measure as cost_of
from ..frame.probe import tidy
from ..frame.team import Team

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One of several ways, done by all ranks."""

    name: str
    times: list[float] = field(default_factory=list[float])
    """Seconds, by the clock or of the processor, one a round, of the rank that takes most."""
    collectives: int
    received: int
    """Bytes that collectives bring to one rank, the one that gets most."""
    memory: int
    """Most memory that it takes beyond what was there before, of the worst rank."""


def measure_ways(team: Team, steps: Mapping[str, Step], warm_ups: int) -> dict[str, Way]:
    """Return what all ways send and hold; their times are to be measured, in turn."""
    found: dict[str, Way] = {}
    for name, step in steps.items():
        collectives, received = count_collectives(step, warm_ups)
        tidy()
        team.barrier()
        found[name] = Way(
            name=name,
            collectives=collectives,
            received=max(team.gather(received)),
            memory=max(team.gather(cost_of(step).extra_bytes)),
        )
    return found


def count_collectives(step: Step, warm_ups: int) -> tuple[int, int]:
    """Return how many collectives a step makes once it is warm, and what they bring to a rank."""
    for _ in range(warm_ups):
        step()
    with CommDebugMode() as comm:
        step()
    return comm.get_total_counts(), sum(comm.get_comm_bytes().values())
