"""Redistribute beside torch's DTensor: ``python -m tools.bench.redistribute``.

Bytes, memory and plans are looked at without moving anything, in one process; wall time is that of
four processes that speak Gloo.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from dtckpt.tools.cli.console import stdout_console

from .launch import WorkersFailed, run_processes
from .machine import describe
from .redistribute_links import Link
from .redistribute_simulated import settings, simulate, time_plans
from .redistribute_tables import (
    Grid,
    bytes_grid,
    honesty_grid,
    links_grid,
    miscounted,
    plans_grid,
    summary_grid,
    wall_grid,
)
from .redistribute_torch import join_fake_job
from .redistribute_wall import RANKS, RESULT_FILE, SIZES, Job, Timed, work

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
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all numbers.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write tables.")
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
    document: dict[str, Any] = {"machine": describe(tempfile.gettempdir())}
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
        links, timed = _measured(job)
        document |= {"links": list(map(asdict, links)), "timed": list(map(asdict, timed))}
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
        document["plans"] = times.to_json()
        grids.append(plans_grid(times))
    console = stdout_console()
    for grid in grids:
        console.print(grid.rich())
    for text in wrong:
        click.echo(text, err=True)
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1))
    if markdown_file is not None:
        facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
        tables = "\n".join(grid.markdown() for grid in grids)
        markdown_file.write_text(f"Machine: {facts}.\n\n{tables}")


def _measured(job: Job) -> tuple[list[Link], list[Timed]]:
    """Return what four processes measured."""
    folder = Path(tempfile.mkdtemp(prefix="dtckpt-bench-"))
    try:
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        run_processes(work, folder / "job.json", RANKS, "redistribute")
        found = json.loads((folder / RESULT_FILE).read_text())
    except WorkersFailed as error:
        raise click.ClickException(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    timed = [Timed(**one | {"mesh": tuple(one["mesh"])}) for one in found["timed"]]
    return [Link(**one) for one in found["links"]], timed


if __name__ == "__main__":
    sys.exit(main())
