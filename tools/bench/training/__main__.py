"""Steps of training beside torch's parallelisms: ``python -m tools.bench.training``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click

from dtckpt.tools.cli.common.console import iec

from ..frame.output import output_options, publish
from ..frame.table import Grid, verdict
from ..frame.timing import OURS, PEER
from ..launch import WorkersFailed, on_ranks
from .elastic import Elastic, measure_elastic
from .sequence import POSITIONS, measure_sequence
from .steps import RANKS, SPREADS, Stepped, measure
from .ways import Way

T = TypeVar("T")

ELASTIC = "elastic"
SEQUENCE = "sequence"
"""The names of what is no spread."""


def grid(found: list[Stepped]) -> Grid:
    """Return a table with a row for every spread."""
    return Grid(
        title="One training step",
        what="torch / ours of the slowest of 4 Gloo ranks; a ratio is the median over the rounds.",
        headings=("spread", "ms", "ratio", "collectives", "received", "memory", "loss", "bar", ""),
        rows=tuple(
            (
                row.name,
                _pair(row.seconds(PEER), row.seconds(OURS), lambda s: f"{s * 1e3:.0f}"),
                "" if row.ratio is None else f"{row.ratio:.2f}",
                _pair(row.collectives[PEER], row.collectives[OURS], str),
                _pair(row.sent[PEER], row.sent[OURS], iec),
                _pair(row.memory[PEER], row.memory[OURS], iec),
                _pair(row.losses[PEER], row.losses[OURS], lambda loss: f"{loss:.5f}"),
                f"{row.bar:.2f}",
                verdict(row.is_met),
            )
            for row in found
        ),
    )


def elastic_grid(found: Elastic, steps: int) -> Grid:
    """Return a table with a row for every way to take a step."""
    ordinary = median(found.ways[0].times)
    told = "are" if found.is_same else "ARE NOT"
    return Grid(
        title="Steps that have the same bits on any mesh",
        what="The slowest of 4 Gloo ranks; times are medians over the rounds, of steps in turn.",
        headings=("a step", "ms", "of the first", "collectives", "received", "memory"),
        rows=tuple(
            (
                way.name,
                f"{median(way.times) * 1e3:.0f}",
                f"{median(way.times) / ordinary:.2f}",
                str(way.collectives),
                iec(way.received),
                iec(way.memory),
            )
            for way in found.ways
        ),
        facts=f"{steps} steps on 4 ranks {told} those on 4, then 2, then 3, to the last bit",
    )


def sequence_grid(found: list[Way]) -> Grid:
    """Return a table with a row for every way to compute attention."""
    alone = min(found[0].times)
    return Grid(
        title="Attention over a sequence that ranks share",
        what=f"Causal, {POSITIONS} positions, 4 heads of 64, fp32, forward and backward, on 4 Gloo "
        "ranks. Processor time of the rank that takes most, the least of the rounds.",
        headings=("way", "ms", "of one device", "received", "memory"),
        rows=tuple(
            (
                one.name,
                f"{min(one.times) * 1e3:.0f}",
                f"{min(one.times) / alone:.2f}",
                iec(one.received),
                iec(one.memory),
            )
            for one in found
        ),
    )


def _pair(theirs: T | None, ours: T | None, show: Callable[[T], str]) -> str:
    return " / ".join("-" if value is None else show(value) for value in (theirs, ours))


@click.command("training")
@click.option("--rounds", default=15, type=click.IntRange(1), help="Timed rounds of a row.")
@click.option("--only", metavar="NAME[,NAME]", default="", help="Rows whose names have these.")
@click.option("--steps", default=20, type=click.IntRange(4), help="Of the elastic training.")
@output_options
def main(
    rounds: int, only: str, steps: int, json_file: Path | None, markdown_file: Path | None
) -> None:
    """Time a step of a GPT under TP, FSDP and both, beside torch's, and what is ours alone."""
    wanted = only.split(",")
    job = {"rounds": rounds, "only": wanted, "steps": steps}
    grids: list[Grid] = []
    document: dict[str, Any] = {}
    try:
        if any(name in spread.name for name in wanted for spread in SPREADS):
            found = [Stepped(**one) for one in on_ranks(measure, job, RANKS, "training")]
            grids.append(grid(found))
            document["rows"] = [row.to_json() for row in found]
        if any(name in ELASTIC for name in wanted):
            told = on_ranks(measure_elastic, job, RANKS, "elastic steps")
            elastic = Elastic(ways=[Way(**one) for one in told["ways"]], is_same=told["is_same"])
            grids.append(elastic_grid(elastic, steps))
            document[ELASTIC] = told
        if any(name in SEQUENCE for name in wanted):
            shared = on_ranks(measure_sequence, job, RANKS, "attention")
            grids.append(sequence_grid([Way(**one) for one in shared]))
            document[SEQUENCE] = shared
    except WorkersFailed as error:
        raise click.ClickException(str(error)) from error
    publish(grids, document, json_file, markdown_file)


if __name__ == "__main__":
    sys.exit(main())
