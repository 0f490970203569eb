"""``python -m tests.fuzz``: run random programs for some minutes; status 1 where some differ."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import click

from .generator import PROFILES, program_of
from .session import Settings, hunt
from .worker import work


@click.command("fuzz")
@click.option("--minutes", default=3.0, help="How long.")
@click.option("--seed", default=1, help="Which programs: the same seed gives the same ones.")
@click.option("--start", default=0, help="Number of the first program.")
@click.option("--only", default="", help=f"Profiles, separated by commas: {', '.join(PROFILES)}.")
@click.option("--jobs", default=1, help="Processes.")
@click.option("--first", is_flag=True, help="Stop at the first kind of finding.")
@click.option("--compiled", default=0.0, help="Share of the programs that are compiled, too.")
@click.option("--show", type=int, help="Print the program of this number, and what comes of it.")
@click.option("--report", type=click.Path(path_type=Path), help="Write findings, one JSON a line.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    minutes: float,
    seed: int,
    start: int,
    only: str,
    jobs: int,
    first: bool,
    compiled: float,
    show: int | None,
    report: Path | None,
    worker: bool,
) -> None:
    """Compare random programs on DTensors with one device."""
    warnings.simplefilter("ignore")
    profiles = frozenset(only.split(",")) if only else frozenset[str]()
    unknown = profiles - set(PROFILES)
    if unknown:
        raise click.BadParameter(f"no such profiles: {sorted(unknown)}")
    settings = Settings(
        seed=seed, start=start, only=profiles, minutes=minutes, jobs=jobs, compiled=compiled
    )
    if show is not None:
        click.echo(program_of(seed, show, profiles))
        work(settings, [show], sys.stdout)
    elif worker:
        work(settings, None, sys.stdout)
    else:
        sys.exit(1 if hunt(settings, stop_at_first=first, report=report) else 0)


if __name__ == "__main__":
    main()
