"""The checkpoints of a run, for people to read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.console import age, count, iec, printable, stdout_console
from ..common.grid import Grid, Line, Lines, plain, show

if TYPE_CHECKING:
    from ....checkpoint.runs.overview import StepOverview


def show_steps(url: str, steps: Sequence[StepOverview]) -> None:
    """Print a line for each, or two where lines are short, and what is wrong."""
    console = stdout_console()
    now = time.time()
    own = sum(step.own_bytes for step in steps)
    whole = sum(step.state == "committed" for step in steps)
    head = f"{count(whole, 'committed checkpoint')} in {printable(url)}, {iec(own)} in all"
    show(console, Lines([plain(head), plain("")]))
    show(console, steps_table(steps, now, console.width))
    for step in steps:
        if step.problem:
            told = printable(f"{step.name}: {step.problem}")
            show(console, Lines([plain(""), plain(told, "red")]))


def steps_table(steps: Sequence[StepOverview], now: float, width: int) -> Grid | Lines:
    """Return a line for each, or two where they would be longer than ``width``."""
    grid = Grid("step", "checkpoint", "age", "bytes", "state", "", right=(0, 2, 3))
    for step in steps:
        grid.add(*_cells(step, now))
    if grid.width <= width:
        return grid
    return Lines([line for step in steps for line in _narrow(step, now)])


def _cells(step: StepOverview, now: float) -> tuple[Line, ...]:
    style = {"committed": "green", "damaged": "red"}.get(step.state, "yellow")
    old = "" if step.saved_at is None else age(now - step.saved_at)
    return (
        plain(str(step.number)),
        plain(printable(step.name)),
        plain(old),
        plain(iec(step.own_bytes), "cyan"),
        plain(step.state, style),
        plain(", ".join(_notes(step)), "dim"),
    )


def _narrow(step: StepOverview, now: float) -> list[Line]:
    """Return a step with its notes on a line of their own."""
    _, name, *facts, notes = _cells(step, now)
    first = [part for cell in (name, *facts) for part in (("  ", ""), *cell)][1:]
    return [first, [("  ", ""), *notes]] if notes[0][0] else [first]


def _notes(step: StepOverview) -> list[str]:
    notes = ["pinned"] if step.is_pinned else []
    if step.is_abandoned:
        notes.append("the run went back from it")
    if step.format not in ("", "dtckpt"):
        notes.append(step.format)
    if step.bases:
        notes.append(f"refers to {printable(', '.join(step.bases))} ({iec(step.borrowed_bytes)})")
    if step.needed_by:
        notes.append(f"needed by {printable(', '.join(step.needed_by))}")
    return notes
