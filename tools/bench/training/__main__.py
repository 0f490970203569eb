"""Steps of training beside torch's parallelisms: ``python -m tools.bench.training``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from dtckpt.tools.cli.console import iec

from ..frame.output import output_options, publish
from ..frame.table import Grid, verdict
from ..frame.timing import OURS, PEER
from ..launch import WorkersFailed, on_ranks
from .steps import RANKS, Stepped, measure

T = TypeVar("T")


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


def _pair(theirs: T | None, ours: T | None, show: Callable[[T], str]) -> str:
    return " / ".join("-" if value is None else show(value) for value in (theirs, ours))


@click.command("training")
@click.option("--rounds", default=15, type=click.IntRange(1), help="Timed rounds of a row.")
@click.option("--only", metavar="NAME[,NAME]", default="", help="Rows whose names have these.")
@output_options
def main(rounds: int, only: str, json_file: Path | None, markdown_file: Path | None) -> None:
    """Time a step of a GPT under TP, FSDP and both, beside torch's."""
    job = {"rounds": rounds, "only": only.split(",")}
    try:
        told = on_ranks(measure, job, RANKS, "training")
    except WorkersFailed as error:
        raise click.ClickException(str(error)) from error
    found = [Stepped(**one) for one in told]
    document = {"rows": [row.to_json() for row in found]}
    publish([grid(found)], document, json_file, markdown_file)


if __name__ == "__main__":
    sys.exit(main())
