"""Planning at scale, simulated: ``python -m tools.bench.scale``.

No processes are started and no bytes are moved: every number is the time, or the result, of what
one rank computes, since each derives its plan from layouts alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from dtckpt.tools.cli.console import iec, stdout_console

from .machine import describe
from .scale_jobs import JOBS, MIN_RANKS, transformer
from .scale_plan import Scale, simulate

_PLAN_SECONDS = 1.0
_MANIFEST_BYTES = 4 << 20
_BALANCE = 1.1

_HEADINGS = (
    "save",
    "ranks",
    "rank's plan",
    "cached",
    "coordinator",
    "its memory",
    "manifest",
    "busiest / mean",
    "forced",
    "load by",
    "load plan",
    "files",
    "ranges",
    "bars",
)


def missed(scale: Scale) -> list[str]:
    """Return the bars that a result misses."""
    bars = {
        f"plan over {_PLAN_SECONDS:g} s": scale.plan_seconds > _PLAN_SECONDS,
        f"manifest over {iec(_MANIFEST_BYTES)}": scale.manifest_bytes > _MANIFEST_BYTES,
        f"busiest over {_BALANCE:g} x forced": scale.busiest > _BALANCE * scale.forced,
    }
    return [bar for bar, is_missed in bars.items() if is_missed]


def _cells(scale: Scale) -> list[str]:
    return [
        scale.job,
        f"{scale.ranks:,}",
        f"{scale.plan_seconds:.3f} s",
        f"{scale.cached_seconds:.3f} s",
        f"{scale.coordinator_seconds:.3f} s",
        iec(scale.coordinator_bytes),
        iec(scale.manifest_bytes),
        f"{scale.busiest:.3f}",
        f"{scale.forced:.3f}",
        scale.loaded_by,
        f"{scale.load_seconds:.3f} s",
        f"{scale.load_files:,}",
        f"{scale.load_ranges:,}",
        "; ".join(missed(scale)) or "pass",
    ]


def markdown(scales: Iterable[Scale]) -> str:
    """Return the results as a Markdown table."""
    rows = [list(_HEADINGS), ["---"] * len(_HEADINGS), *(_cells(scale) for scale in scales)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _counts(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"expected numbers of ranks, such as 64,512; got {text}"
        ) from error
    if any(count < MIN_RANKS or count % MIN_RANKS for count in counts):
        raise click.BadParameter(f"numbers of ranks must be multiples of {MIN_RANKS}")
    return counts


@click.command("scale")
@click.option("--ranks", default="64,512,4096,16384", callback=_counts, help="Numbers of ranks.")
@click.option("--tensors", default=3_000, type=click.IntRange(24), help="Tensors of the state.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all numbers.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write a table.")
def main(
    ranks: tuple[int, ...], tensors: int, json_file: Path | None, markdown_file: Path | None
) -> None:
    """Simulate the planning of saves and loads by very many ranks."""
    weights = transformer(tensors // 3)
    scales: list[Scale] = []
    for save, load in JOBS:
        for count in ranks:
            click.echo(f"{save.__name__} on {count:,} ranks", err=True)
            scales.append(simulate(save(count, weights), load(count, weights)))
    table = Table(title=f"Planning, {scales[0].tensors:,} tensors", title_justify="left")
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if number in (0, 9, 13) else "right")
    for scale in scales:
        table.add_row(*_cells(scale), style="red" if missed(scale) else None)
    stdout_console().print(table)
    if json_file is not None:
        rows = [asdict(scale) | {"missed": missed(scale)} for scale in scales]
        document = {"machine": describe(tempfile.gettempdir()), "rows": rows}
        json_file.write_text(json.dumps(document, indent=1))
    if markdown_file is not None:
        markdown_file.write_text(markdown(scales))


if __name__ == "__main__":
    sys.exit(main())
