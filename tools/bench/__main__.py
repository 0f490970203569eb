"""``make bench``: dtckpt beside its peers and the limits of the machine, in one run."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click

from .frame.machine import describe
from .frame.output import output_options, publish
from .frame.report import Result, grids
from .frame.row import OURS, Row
from .frame.setting import Setting, parse_size
from .launch import WorkersFailed
from .rows import ROWS
from .running import run

SCHEMA_VERSION = 1


def _size(_ctx: click.Context, _param: click.Parameter, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _rows(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[Row, ...]:
    wanted = text.split(",") if text else [row.name for row in ROWS]
    known = {row.name: row for row in ROWS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise click.BadParameter(f"no row {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(row for row in ROWS if row.name in wanted)


@click.command("bench")
@click.option("--size", default="1GiB", callback=_size, help="Bytes of the whole state.")
@click.option("--ranks", default=2, type=click.IntRange(1), help="Processes that save.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Timed rounds of each system.")
@click.option("--layers", default=8, type=click.IntRange(1), help="Fewer make larger tensors.")
@click.option("--tensors", default=10_000, type=click.IntRange(1), help="Number of small tensors.")
@click.option("--dir", "directory", help="Where to write; a temporary directory by default.")
@click.option("--only", callback=_rows, metavar="ROW[,ROW]", help="Measure these rows alone.")
@output_options
def main(
    size: int,
    ranks: int,
    rounds: int,
    layers: int,
    tensors: int,
    directory: str | None,
    only: tuple[Row, ...],
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure saves and loads of checkpoints beside their peers and the machine's limits."""
    setting = Setting(
        size=size,
        ranks=ranks,
        rounds=rounds,
        layers=layers,
        small_tensors=tensors,
        directory=directory or tempfile.gettempdir(),
    )
    machine = describe(setting.directory)
    start = time.monotonic()
    try:
        found = {row.name: Result(row=row, outcome=outcome) for row, outcome in run(only, setting)}
    except WorkersFailed as error:
        raise click.ClickException(str(error)) from error
    results = [found[row.name] for row in only]
    click.echo(f"{time.monotonic() - start:.0f} s in all", err=True)
    document = {
        "schema_version": SCHEMA_VERSION,
        "machine": machine,
        "setting": asdict(setting),
        "rows": {result.row.name: result.to_json() for result in results},
    }
    publish(grids(results), document, json_file, markdown_file)
    failed = [result.row.name for result in results if OURS in result.outcome.skipped]
    if failed:
        raise click.ClickException(f"dtckpt itself failed in {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(main())
