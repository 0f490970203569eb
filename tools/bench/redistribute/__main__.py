"""Redistribute beside torch's DTensor: ``python -m tools.bench.redistribute``.

Bytes, memory and plans are looked at without moving anything, in one process; wall time is that of
four processes that speak Gloo.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from ..fake_job import join_fake_job
from ..frame.output import output_options, publish
from ..frame.table import Grid
from ..launch import WorkersFailed, on_ranks
from .links import Link
from .plan_times import summary, time_plans
from .planned import settings, simulate
from .tables import (
    bytes_grid,
    honesty_grid,
    links_grid,
    miscounted,
    plans_grid,
    summary_grid,
    wall_grid,
)
from .wall import RANKS, SIZES, Job, Timed, measure

_PARTS = ("bytes", "plans", "links", "wall")


def _names(_ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    known = _PARTS if param.name == "only" else tuple(size.name for size in SIZES)
    names = text.split(",")
    for name in names:
        if name not in known:
            raise click.BadParameter(f"no {name!r}; there are {', '.join(known)}")
    return names


@click.command("redistribute")
@click.option("--only", default=",".join(_PARTS), callback=_names, help="Measure these parts.")
@click.option(
    "--sizes",
    default=",".join(size.name for size in SIZES),
    callback=_names,
    help="Tensors that are moved, and the largest size of links.",
)
@click.option("--every", default=1, type=click.IntRange(1), help="Only so many-th pairs.")
@click.option("--samples", default=1000, type=click.IntRange(0), help="Random pairs.")
@click.option("--rounds", default=0, help="Timed rounds; by default more of smaller tensors.")
@output_options
def main(
    only: list[str],
    sizes: list[str],
    every: int,
    samples: int,
    rounds: int,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure redistribute: bytes, memory, plans, and wall time beside torch's."""
    document: dict[str, Any] = {}
    grids: list[Grid] = []
    wrong: list[str] = []
    if {"links", "wall"} & set(only):
        job = Job(
            sizes=sizes,
            every=every,
            rounds=rounds,
            skips_links="links" not in only,
            skips_wall="wall" not in only,
        )
        try:
            document |= on_ranks(measure, asdict(job), RANKS, "redistribute")
        except WorkersFailed as error:
            raise click.ClickException(str(error)) from error
        links = [Link(**one) for one in document["links"]]
        timed = [Timed(**one | {"mesh": tuple(one["mesh"])}) for one in document["timed"]]
        grids += [links_grid(links)] if links else []
        grids += [summary_grid(timed), wall_grid(timed)] if timed else []
        wrong = miscounted(timed)
    torch.set_num_threads(1)
    if {"bytes", "plans"} & set(only):
        join_fake_job()
    if "bytes" in only:
        found = [simulate(setting) for setting in settings(every, samples)]
        document["bytes"] = [one.to_json() for one in found]
        grids += [bytes_grid(found), honesty_grid(found)]
    if "plans" in only:
        times = time_plans(every)
        document["plans"] = summary(times)
        grids.append(plans_grid(times))
    publish(grids, document, json_file, markdown_file)
    for text in wrong:
        click.echo(text, err=True)


if __name__ == "__main__":
    sys.exit(main())
