"""One operator call beside torch's DTensor: ``python -m tools.bench.dispatch``.

Everything runs in one process on tensors so small that only the way to the kernel counts, and on a
fake process group, so that communication is free for everybody.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import click
import torch
from rich.table import Table

from dtckpt.tools.cli.console import stdout_console

from .dispatch_rows import WARM_ROWS, cold_rows
from .dispatch_sides import ALONE, sides
from .dispatch_timing import Measured, measure_cold, measure_warm
from .machine import describe
from .report import show

_WARM_MEDIAN = 0.7
"""The most that the median of all warm ratios may be."""

_SIDES = ("plain", "torch", "dtckpt")
_HEADINGS = ("operator", *_SIDES, "ratio", "bar", "")


def _cells(row: Measured) -> list[str]:
    times = [row.seconds(side) for side in _SIDES]
    return [
        f"{row.name}, cold, {row.axes} axes" if row.is_cold else row.name,
        *("failed" if t is None else show(t, "microseconds") for t in times),
        "-" if row.ratio is None else show(row.ratio, "ratio"),
        show(row.bar, "ratio"),
        {True: "pass", False: "MISS", None: "not compared"}[row.is_met],
    ]


def warm_median(rows: Iterable[Measured]) -> float | None:
    """Return the median of the warm ratios on the mesh of all ranks."""
    warm = [row for row in rows if not row.is_cold and row.axes != ALONE]
    ratios = [row.ratio for row in warm if row.ratio is not None]
    return median(ratios) if ratios else None


def _summary(rows: Sequence[Measured]) -> list[str]:
    found = warm_median(rows)
    if found is None:
        return []
    verdict = "pass" if found <= _WARM_MEDIAN else "MISS"
    return [
        "median of the warm ratios, 16 ranks",
        "",
        "",
        "",
        show(found, "ratio"),
        "0.70",
        verdict,
    ]


def markdown(rows: Sequence[Measured]) -> str:
    """Return the results as a Markdown table."""
    lines = [list(_HEADINGS), ["---", *["---:"] * 5, "---"], *map(_cells, rows), _summary(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines if line)


def _table(rows: Sequence[Measured]) -> Table:
    table = Table(title="One operator call", title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("operator", "") else "right")
    for row in rows:
        style = {True: None, False: "red", None: "dim"}[row.is_met]
        table.add_row(*_cells(row), style=style)
    if summary := _summary(rows):
        table.add_row(*summary, style="bold")
    return table


@click.command("dispatch")
@click.option("--rounds", default=25, type=click.IntRange(1), help="Timed rounds of a warm row.")
@click.option("--cold-rounds", default=7, type=click.IntRange(0), help="The same of a cold row.")
@click.option("--cold-axes", default="1,2,3,4", help="Axes of the meshes of cold rows.")
@click.option(
    "--batch-seconds", default=0.004, help="What the calls of a warm round take together."
)
@click.option(
    "--only", metavar="NAME[,NAME]", help="Measure the rows whose names have one of these."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all numbers.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write a table.")
def main(
    rounds: int,
    cold_rounds: int,
    cold_axes: str,
    batch_seconds: float,
    only: str | None,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Time operators on plain tensors, torch's DTensors and ours."""
    torch.set_num_threads(1)
    names = only.split(",") if only else [""]
    by_axes = sides()
    rows = [
        measure_warm(warm, by_axes[warm.axes], rounds, batch_seconds)
        for warm in WARM_ROWS
        if any(name in warm.name for name in names)
    ]
    for cold in cold_rows() if cold_rounds else ():
        wanted = str(cold.axes) in cold_axes.split(",")
        if wanted and any(name in f"{cold.name}, cold" for name in names):
            rows.append(measure_cold(cold, by_axes[cold.axes], cold_rounds))
    stdout_console().print(_table(rows))
    for row in rows:
        for side, reason in row.failed.items():
            click.echo(f"{row.name}: {side} failed: {reason}", err=True)
    machine = describe(tempfile.gettempdir())
    if json_file is not None:
        found = {"machine": machine, "rows": [row.to_json() for row in rows]}
        json_file.write_text(json.dumps(found | {"warm_median": warm_median(rows)}, indent=1))
    if markdown_file is not None:
        facts = ", ".join(f"{key} {value}" for key, value in machine.items())
        markdown_file.write_text(f"Machine: {facts}.\n\n{markdown(rows)}")


if __name__ == "__main__":
    sys.exit(main())
