"""One operator call beside torch's DTensor: ``python -m tools.bench.dispatch``.

Everything runs on tensors so small that only the way to the kernel counts, and on a fake process
group, so that communication is free for everybody. With ``--beside`` the same is measured of
another checkout, in turn.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.table import Table

from dtckpt.tools.cli.console import stdout_console

from ..machine import describe
from ..report import show
from .beside import ROOT, CheckoutFailed, checkout, revision
from .rows import ALL_ROWS, ColdRow, WarmRow
from .sides import ALONE, sides
from .timing import OURS, PEER, Measured, measure, ratio, trial_of, undisturbed

_WARM_MEDIAN = 0.7
"""The most that the median of all warm ratios may be."""

_SIDES = ("plain", PEER, OURS)
_HEADINGS = ("operator", *_SIDES, "ratio", "bar", "")
_VERDICTS = {True: "pass", False: "MISS", None: "not compared"}


def _name(row: Measured) -> str:
    return f"{row.name}, cold, {row.axes} axes" if row.is_cold else row.name


def _time(seconds: float | None) -> str:
    return "failed" if seconds is None else show(seconds, "microseconds")


def _share(found: float | None) -> str:
    return "-" if found is None else show(found, "ratio")


def _line(row: Measured) -> list[str]:
    times = (_time(row.seconds(side)) for side in _SIDES)
    return [_name(row), *times, _share(row.ratio), show(row.bar, "ratio"), _VERDICTS[row.is_met]]


def _warm(rows: Iterable[Measured]) -> list[Measured]:
    """Return the warm rows on the mesh of all ranks."""
    return [row for row in rows if not row.is_cold and row.axes != ALONE]


def _middle(ratios: Iterable[float | None]) -> float | None:
    found = [one for one in ratios if one is not None]
    return median(found) if found else None


def warm_median(rows: Iterable[Measured]) -> float | None:
    """Return the median of the warm ratios on the mesh of all ranks."""
    return _middle(row.ratio for row in _warm(rows))


_SUMMARY = "median of the warm ratios, 16 ranks"


def _lines(rows: Sequence[Measured]) -> list[list[str]]:
    lines = [_line(row) for row in rows]
    found = warm_median(rows)
    if found is not None:
        blank = [""] * len(_SIDES)
        verdict = _VERDICTS[found <= _WARM_MEDIAN]
        lines.append([_SUMMARY, *blank, show(found, "ratio"), f"{_WARM_MEDIAN:.2f}", verdict])
    return lines


def changes(new: Measured, old: Measured) -> tuple[float | None, float | None]:
    """Return our time here over that beside us: median over the rounds, and of the best rounds."""
    ours, theirs = new.times.get(OURS), old.times.get(OURS)
    return ratio(ours, theirs), min(ours) / min(theirs) if ours and theirs else None


def _beside_lines(rows: Sequence[dict[str, Measured]]) -> list[list[str]]:
    """Return lines of two checkouts, the one beside ours first."""
    lines: list[list[str]] = []
    for row in rows:
        new, old = row.values()
        times = (new.seconds(PEER), old.seconds(OURS), new.seconds(OURS))
        shares = (old.ratio, new.ratio, *changes(new, old))
        lines.append([_name(new), *map(_time, times), *map(_share, shares)])
    pairs = [(new, old) for new, old in (row.values() for row in rows) if _warm([new])]
    shares = (
        warm_median(old for _, old in pairs),
        warm_median(new for new, _ in pairs),
        *map(_middle, zip(*(changes(new, old) for new, old in pairs), strict=True)),
    )
    return [*lines, [_SUMMARY, "", "", "", *map(_share, shares)]] if pairs else lines


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return the results as a Markdown table."""
    rules = ["---" if heading in ("operator", "") else "---:" for heading in headings]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, rules, *lines))


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title="One operator call", title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("operator", "") else "right")
    for line in lines:
        table.add_row(*line, style={"MISS": "red", "not compared": "dim"}.get(line[-1]))
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
@click.option(
    "--beside",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Another checkout with a .venv of its own: measured in the same run, round by round.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all numbers.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write a table.")
def main(
    rounds: int,
    cold_rounds: int,
    cold_axes: str,
    batch_seconds: float,
    only: str | None,
    beside: Path | None,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Time operators on plain tensors, torch's DTensors and ours."""
    names = only.split(",") if only else [""]
    chosen = [row for row in ALL_ROWS if any(name in _full_name(row) for name in names)]
    wanted = [
        (row, cold_rounds if isinstance(row, ColdRow) else rounds)
        for row in chosen
        if not isinstance(row, ColdRow) or (cold_rounds and str(row.axes) in cold_axes.split(","))
    ]
    document: dict[str, Any] = {"machine": describe(tempfile.gettempdir())}
    if beside is None:
        found = _here(wanted, batch_seconds)
        headings, lines = _HEADINGS, _lines(found)
        document |= {"rows": [row.to_json() for row in found], "warm_median": warm_median(found)}
    else:
        try:
            pairs = _both(wanted, batch_seconds, beside)
        except CheckoutFailed as error:
            raise click.ClickException(str(error)) from error
        found = [row for pair in pairs for row in pair.values()]
        old, new = revision(beside), revision(ROOT)
        document |= {"revisions": {"here": new, "beside": old}}
        document |= {"rows": [{k: row.to_json() for k, row in pair.items()} for pair in pairs]}
        shares = (f"{old} / {PEER}", f"{new} / {PEER}", f"{new} / {old}", "its best round")
        headings, lines = ("operator", PEER, old, new, *shares), _beside_lines(pairs)
    stdout_console().print(_table(headings, lines))
    for row in found:
        for side, reason in row.failed.items():
            click.echo(f"{row.name}: {side} failed: {reason}", err=True)
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1))
    if markdown_file is not None:
        facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
        markdown_file.write_text(f"Machine: {facts}.\n\n{markdown(headings, lines)}")


def _full_name(row: WarmRow | ColdRow) -> str:
    return f"{row.name}, cold" if isinstance(row, ColdRow) else row.name


def _here(wanted: Sequence[tuple[WarmRow | ColdRow, int]], batch_seconds: float) -> list[Measured]:
    torch.set_num_threads(1)
    by_axes = sides()
    found: list[Measured] = []
    for row, rounds in wanted:
        with undisturbed():
            trial = trial_of(row, by_axes[row.axes], batch_seconds)
            found += measure(row, {"here": trial}, rounds).values()
    return found


def _both(
    wanted: Sequence[tuple[WarmRow | ColdRow, int]], batch_seconds: float, beside: Path
) -> list[dict[str, Measured]]:
    found: list[dict[str, Measured]] = []
    with ExitStack() as stack:
        places = {"here": ROOT, "beside": beside}
        checkouts = {k: stack.enter_context(checkout(place)) for k, place in places.items()}
        for row, rounds in wanted:
            trials = {k: one.trial(row, batch_seconds) for k, one in checkouts.items()}
            found.append(measure(row, trials, rounds))
            click.echo(_full_name(row), err=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
