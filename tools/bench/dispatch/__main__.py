"""One operator call beside torch's DTensor: ``python -m tools.bench.dispatch``.

Everything runs on tensors so small that only the way to the kernel counts, and on a fake process
group, so that communication is free for everybody. With ``--beside`` the same is measured of
another checkout, in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from ..frame.output import output_options, publish
from ..frame.table import Grid, show, verdict
from ..frame.timing import OURS, PEER, Trial, ratio, undisturbed
from .beside import ROOT, CheckoutFailed, checkout, revision
from .rows import ALL_ROWS, ColdRow, WarmRow
from .sides import ALONE, sides
from .timing import Measured, measure, trial_of

_WARM_MEDIAN = 0.7
"""The most that the median of all warm ratios may be."""

_TITLE = "One operator call"
_SIDES = ("plain", PEER, OURS)
_SUMMARY = "median of the warm ratios, 16 ranks"

Pair = dict[str, Measured]
"""What a row took ``here``, and ``beside`` us."""


def grid(rows: Sequence[Measured]) -> Grid:
    """Return every row on all sides."""
    lines = [
        (
            _name(row),
            *(_time(row.seconds(side)) for side in _SIDES),
            _share(row.ratio),
            show(row.bar, "ratio"),
            verdict(row.is_met),
        )
        for row in rows
    ]
    found = warm_median(rows)
    if found is not None:
        shares = _share(found), _share(_WARM_MEDIAN)
        lines.append((_SUMMARY, "", "", "", *shares, verdict(found <= _WARM_MEDIAN)))
    headings = ("operator", *_SIDES, "ratio", "bar", "")
    return Grid(title=_TITLE, headings=headings, rows=tuple(lines))


def beside_grid(pairs: Sequence[Pair], new: str, old: str) -> Grid:
    """Return every row of two checkouts: here, and beside us."""
    lines: list[tuple[str, ...]] = []
    for pair in pairs:
        here, beside = pair["here"], pair["beside"]
        times = (here.seconds(PEER), beside.seconds(OURS), here.seconds(OURS))
        shares = (beside.ratio, here.ratio, *_changes(pair))
        lines.append((_name(here), *map(_time, times), *map(_share, shares)))
    warm = [pair for pair in pairs if _is_warm(pair["here"])]
    if warm:
        shares = [warm_median(pair[place] for pair in warm) for place in ("beside", "here")]
        shares += map(_middle, zip(*map(_changes, warm), strict=True))
        lines.append((_SUMMARY, "", "", "", *map(_share, shares)))
    shares = (f"{old} / {PEER}", f"{new} / {PEER}", f"{new} / {old}", "of best rounds")
    return Grid(title=_TITLE, headings=("operator", PEER, old, new, *shares), rows=tuple(lines))


def warm_median(rows: Iterable[Measured]) -> float | None:
    """Return the median of the warm ratios on the mesh of all ranks."""
    return _middle(row.ratio for row in rows if _is_warm(row))


def _is_warm(row: Measured) -> bool:
    return not row.is_cold and row.axes != ALONE


def _changes(pair: Pair) -> tuple[float | None, float | None]:
    """Return our time here over that beside us: median over the rounds, and of the best rounds."""
    here, beside = (pair[place].times.get(OURS) for place in ("here", "beside"))
    return ratio(here, beside), min(here) / min(beside) if here and beside else None


def _middle(ratios: Iterable[float | None]) -> float | None:
    found = [one for one in ratios if one is not None]
    return median(found) if found else None


def _name(row: Measured) -> str:
    return f"{row.name}, cold, {row.axes} axes" if row.is_cold else row.name


def _time(seconds: float | None) -> str:
    return "failed" if seconds is None else show(seconds, "microseconds")


def _share(found: float | None) -> str:
    return "-" if found is None else show(found, "ratio")


@click.command("dispatch")
@click.option("--rounds", default=25, type=click.IntRange(1), help="Timed rounds of a warm row.")
@click.option("--cold-rounds", default=7, type=click.IntRange(0), help="The same of a cold row.")
@click.option("--cold-axes", default="1,2,3,4", help="Axes of the meshes of cold rows.")
@click.option(
    "--batch-seconds", default=0.004, help="What the calls of a warm round take together."
)
@click.option(
    "--only", metavar="NAME[,NAME]", default="", help="Rows whose names have one of these."
)
@click.option(
    "--beside",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Another checkout with a .venv of its own: measured in the same run, round by round.",
)
@output_options
def main(
    rounds: int,
    cold_rounds: int,
    cold_axes: str,
    batch_seconds: float,
    only: str,
    beside: Path | None,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Time operators on plain tensors, torch's DTensors and ours."""
    wanted: list[tuple[WarmRow | ColdRow, int]] = []
    for row in ALL_ROWS:
        is_cold = isinstance(row, ColdRow)
        name = f"{row.name}, cold" if is_cold else row.name
        if not any(part in name for part in only.split(",")):
            continue
        if not is_cold or (cold_rounds and str(row.axes) in cold_axes.split(",")):
            wanted.append((row, cold_rounds if is_cold else rounds))
    try:
        pairs = _measured(wanted, batch_seconds, beside)
    except CheckoutFailed as error:
        raise click.ClickException(str(error)) from error
    here = [pair["here"] for pair in pairs]
    if beside is None:
        rows = [row.to_json() for row in here]
        document: dict[str, Any] = {"rows": rows, "warm_median": warm_median(here)}
        table = grid(here)
    else:
        revisions = {"here": revision(ROOT), "beside": revision(beside)}
        rows = [{place: row.to_json() for place, row in pair.items()} for pair in pairs]
        document = {"revisions": revisions, "rows": rows}
        table = beside_grid(pairs, revisions["here"], revisions["beside"])
    publish([table], document, json_file, markdown_file)
    for row in (row for pair in pairs for row in pair.values()):
        for side, reason in row.failed.items():
            click.echo(f"{row.name}: {side} failed: {reason}", err=True)


def _measured(
    wanted: Sequence[tuple[WarmRow | ColdRow, int]], batch_seconds: float, beside: Path | None
) -> list[Pair]:
    """Return what all rows took: in this process, or in one for each of two checkouts."""
    makers: dict[str, Callable[[WarmRow | ColdRow, float], Trial]] = {}
    found: list[Pair] = []
    with ExitStack() as stack:
        if beside is None:
            torch.set_num_threads(1)
            by_axes = sides()
            makers["here"] = lambda row, seconds: trial_of(row, by_axes[row.axes], seconds)
        else:
            for place, folder in (("here", ROOT), ("beside", beside)):
                makers[place] = stack.enter_context(checkout(folder)).trial
        for row, rounds in wanted:
            click.echo(row.name, err=True)
            with undisturbed():
                trials = {place: make(row, batch_seconds) for place, make in makers.items()}
                found.append(measure(row, trials, rounds))
    return found


if __name__ == "__main__":
    sys.exit(main())
