"""Planning at scale, simulated: ``python -m tools.bench.scale``.

No processes are started and no bytes are moved: every number is the time, or the result, of what
one rank computes, since each derives its plan from layouts alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from dtckpt.tools.cli.common.console import iec

from ..frame.output import output_options, publish
from ..frame.table import MISS, Grid, show
from .jobs import JOBS, MIN_RANKS, transformer
from .plan import Scale, simulate

_PLAN_SECONDS = 1.0
_MANIFEST_BYTES = 4 << 20
_SENT_BYTES = 32 << 20
_BALANCE = 1.1

_HEADINGS = (
    "save",
    "ranks",
    "rank's plan",
    "cached",
    "coordinator",
    "its memory",
    "told",
    "manifest",
    "one sends",
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
        f"one rank sends over {iec(_SENT_BYTES)}": scale.sent_bytes > _SENT_BYTES,
        f"busiest over {_BALANCE:g} x forced": scale.busiest > _BALANCE * scale.forced,
    }
    return [bar for bar, is_missed in bars.items() if is_missed]


def grid(scales: Sequence[Scale]) -> Grid:
    """Return one line for every scale."""
    return Grid(
        title=f"Planning, {scales[0].tensors:,} tensors",
        headings=_HEADINGS,
        rows=tuple(_cells(scale) for scale in scales),
    )


def _cells(scale: Scale) -> tuple[str, ...]:
    return (
        scale.job,
        f"{scale.ranks:,}",
        show(scale.plan_seconds, "seconds"),
        show(scale.cached_seconds, "seconds"),
        show(scale.coordinator_seconds, "seconds"),
        iec(scale.coordinator_bytes),
        iec(scale.told_bytes),
        iec(scale.manifest_bytes),
        iec(scale.sent_bytes),
        f"{scale.busiest:.3f}",
        f"{scale.forced:.3f}",
        scale.loaded_by,
        show(scale.load_seconds, "seconds"),
        f"{scale.load_files:,}",
        f"{scale.load_ranges:,}",
        f"{MISS}: {'; '.join(missed(scale))}" if missed(scale) else "pass",
    )


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
@output_options
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
    rows = [asdict(scale) | {"missed": missed(scale)} for scale in scales]
    publish([grid(scales)], {"rows": rows}, json_file, markdown_file)


if __name__ == "__main__":
    sys.exit(main())
