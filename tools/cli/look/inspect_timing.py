"""How long ranks took to save a checkpoint, by the traces of the job, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from ....checkpoint.timing.texts import duration
from ..common.console import count, printable, stdout_console
from ..common.grid import Grid, Line, Lines, plain, show

if TYPE_CHECKING:
    from ....checkpoint.timing.traced import TracedCall, TracedRank

_MAX_RANKS = 16


def show_timing(save: TracedCall) -> None:
    """Print what each phase took all ranks, and each rank, of many those that it took longest."""
    console = stdout_console()
    blank = Lines([plain("")])
    head = f"save of {printable(save.url)} by {count(len(save.ranks), 'rank')}: "
    head += f"{duration(save.seconds)}, the training was held up for {duration(save.stall_seconds)}"
    show(console, Lines([plain(head)]), blank, _phases(save))
    if len(save.ranks) > 1:
        ranks = sorted(save.ranks, key=lambda rank: -rank.seconds)[:_MAX_RANKS]
        grid = _ranks(save.phases, ranks)
        narrow = Lines([_line(save.phases, rank) for rank in ranks])
        show(console, blank, grid if grid.width <= console.width else narrow)
    if len(save.ranks) > _MAX_RANKS:
        rest = f"... and {len(save.ranks) - _MAX_RANKS:,} that were done before these"
        show(console, Lines([plain(rest)]))


def _phases(save: TracedCall) -> Grid:
    grid = Grid("phase", "ranks", "least", "median", "most", "by", right=(1, 2, 3, 4))
    for phase in save.phases:
        took = {rank.rank: rank.phases[phase] for rank in save.ranks if phase in rank.phases}
        slowest = max(took, key=took.__getitem__)
        spread = (min(took.values()), median(took.values()), took[slowest])
        by = f"rank {slowest}" if len(took) > 1 else ""
        cells = (phase, str(len(took)), *map(duration, spread), by)
        grid.add(*map(plain, cells))
    return grid


def _ranks(phases: Sequence[str], ranks: Sequence[TracedRank]) -> Grid:
    """Return a line for each rank, the slowest one first."""
    grid = Grid("rank", "in all", *phases, right=range(len(phases) + 2))
    for rank in ranks:
        took = (duration(rank.phases[p]) if p in rank.phases else "" for p in phases)
        grid.add(*map(plain, (str(rank.rank), duration(rank.seconds), *took)))
    return grid


def _line(phases: Sequence[str], rank: TracedRank) -> Line:
    took = [f"{p} {duration(rank.phases[p])}" for p in phases if p in rank.phases]
    return plain(f"rank {rank.rank}: {duration(rank.seconds)}; {', '.join(took)}")
