"""What one save or load cost: on this rank phase by phase, and over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .texts import amount, duration, rate, table

Kind = Literal["save", "load"]

PHASES: Mapping[Kind, tuple[str, ...]] = {
    "save": ("queue", "plan", "stage", "copy", "compress", "write", "commit"),
    "load": ("manifest", "match", "plan", "read", "receive", "fill"),
}
"""In the order in which a rank comes to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of a phase on one rank."""

    phase: str
    started_at: float
    """Seconds since 1970, by the clock of this host."""
    seconds: float
    """From begin to end, waiting included."""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """What a phase cost one rank."""

    phase: str
    seconds: float
    """Work of this rank, without what it waited for others meanwhile."""
    waited_seconds: float = 0.0
    """What it waited for other ranks meanwhile."""
    num_bytes: int = 0

    @property
    def bytes_per_second(self) -> float:
        """Bytes over the seconds of work; 0 where nothing was moved."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSummary:
    """What a phase cost all ranks that had a part in it: seconds of work, waiting left out."""

    phase: str
    num_ranks: int
    min_seconds: float
    median_seconds: float
    max_seconds: float
    total_bytes: int
    slowest_rank: int
    slowest_host: str

    @property
    def bytes_per_second(self) -> float:
        """Bytes of all ranks over the seconds of the slowest one: what the job got out of it."""
        return self.total_bytes / self.max_seconds if self.max_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a save or load cost, as one rank knows it. ``print`` shows a table.

    Every rank has its own numbers and a summary of those of all ranks, the same everywhere; the
    summary has a line for each phase, however many ranks there are.
    """

    kind: Kind
    url: str
    rank: int
    host: str
    num_ranks: int
    started_at: float
    """Seconds since 1970, by the clock of this host."""
    seconds: float
    """From the call to the end: of a save, until the checkpoint is committed."""
    stall_seconds: float
    """How long the call held the training up: all of a save or load, and of a save in the
    background until the call returned."""
    phases: tuple[PhaseCost, ...]
    """What this rank did, in order."""
    spans: tuple[Span, ...]
    """When it did it; of what came in very many turns the first ones."""
    summary: tuple[PhaseSummary, ...]
    """What all ranks did, up to their last agreement: on the phases that come after it each rank
    has its own numbers alone."""

    @property
    def slowest(self) -> PhaseSummary | None:
        """The phase with the longest work of any rank, and whose that was."""
        return max(self.summary, key=lambda phase: phase.max_seconds, default=None)

    def phase(self, name: str) -> PhaseCost:
        """Return what a phase cost this rank; nothing if it had no part in it.

        >>> done = PhaseCost(phase="write", seconds=2.0, num_bytes=6)
        >>> costs = Costs(kind="save", url="runs/a", rank=0, host="h", num_ranks=1, started_at=0.0,
        ...     seconds=2.5, stall_seconds=0.5, phases=(done,), spans=(), summary=())
        >>> costs.phase("write").bytes_per_second, costs.phase("copy").seconds
        (3.0, 0.0)
        """
        found = (phase for phase in self.phases if phase.phase == name)
        return next(found, PhaseCost(phase=name, seconds=0.0))

    def line(self) -> str:
        """Return this rank's phases, and the slowest of all, in one line."""
        told = ", ".join(_told(phase) for phase in self.phases)
        slow = self.slowest if self.num_ranks > 1 else None
        if slow is None:
            return told
        where = f"rank {slow.slowest_rank} ({slow.slowest_host})"
        return f"{told}; slowest of all: {slow.phase} on {where}, {duration(slow.max_seconds)}"

    def __str__(self) -> str:
        head = (
            f"{self.kind} of {self.url}\n{duration(self.seconds)} in all, the training was held up "
            f"for {duration(self.stall_seconds)}; {self.num_ranks} rank"
            + ("s" if self.num_ranks > 1 else "")
        )
        columns = ("phase", "own", "min", "median", "max", "bytes", "rate", "slowest")
        rows = [columns, *(self._row(phase) for phase in self.summary)]
        alone = {phase.phase for phase in self.summary}
        for own in self.phases:
            if own.phase not in alone:
                rest = (amount(own.num_bytes), rate(own.bytes_per_second), "")
                rows.append((own.phase, duration(own.seconds), "", "", "", *rest))
        hosts = {phase.slowest_rank: phase.slowest_host for phase in self.summary}
        named = [f"rank {rank} is on {host}" for rank, host in sorted(hosts.items())]
        return "\n".join([head, *table(rows), *named])

    def _row(self, all_ranks: PhaseSummary) -> tuple[str, ...]:
        spread = (all_ranks.min_seconds, all_ranks.median_seconds, all_ranks.max_seconds)
        own = [phase for phase in self.phases if phase.phase == all_ranks.phase]
        return (
            all_ranks.phase,
            duration(own[0].seconds) if own else "",
            *map(duration, spread),
            amount(all_ranks.total_bytes),
            rate(all_ranks.bytes_per_second),
            f"rank {all_ranks.slowest_rank}",
        )


def _told(phase: PhaseCost) -> str:
    moved = f" ({rate(phase.bytes_per_second)})" if phase.num_bytes else ""
    return f"{phase.phase} {duration(phase.seconds)}{moved}"


def in_order(kind: Kind, names: Iterable[str]) -> list[str]:
    """Return names of phases, each once, as a rank comes to them."""
    found = dict.fromkeys(names)
    known = PHASES[kind]
    return [name for name in known if name in found] + [n for n in found if n not in known]
