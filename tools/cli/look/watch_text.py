"""A run as it saves, for people to read: a table that is kept up to date, or lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live

from dtckpt.errors import StorageError

from ..common.console import age, count, iec, printable, stdout_console
from ..common.grid import Line, Lines, plain
from ..common.telling import is_quiet
from .ls_text import steps_table

if TYPE_CHECKING:
    from ....checkpoint.runs.overview import StepOverview
    from ....checkpoint.runs.watching import Change, RunView, What

_SECONDS = 0.25
_BESIDE_TABLE = 6
"""Lines of a screen that the table may not have."""
_WORDS: dict[What, str] = {
    "saving": "being saved",
    "progress": "being saved",
    "committed": "committed",
    "damaged": "damaged",
    "pinned": "pinned",
    "unpinned": "not pinned any more",
    "abandoned": "the run went back from it",
    "deleted": "deleted",
}


def head_lines(view: RunView, now: float) -> list[Line]:
    """Return how the run stands, in a few lines."""
    whole = sum(step.state == "committed" for step in view.steps)
    lines = [plain(f"{count(whole, 'committed checkpoint')} in {printable(view.url)}", "bold")]
    newest = view.newest
    if newest is not None:
        text = f"last save: {printable(newest.name)}"
        if newest.saved_at is not None:
            text += f", {age(now - newest.saved_at)} ago"
        if view.seconds_between is not None:
            often = view.seconds_between < 1
            text += "; several a second" if often else f"; one every {age(view.seconds_between)}"
        lines.append(plain(text))
    lines += [plain(f"now: {text}", "yellow") for text in _underway(view, now)]
    return lines


def _underway(view: RunView, now: float) -> Iterator[str]:
    for step in view.steps:
        if step.state == "incomplete":
            text = f"{printable(step.name)}, {progress_text(view, step)}"
            if step.saved_at is not None:
                text += f", written to {age(now - step.saved_at)} ago"
            yield text


def progress_text(view: RunView, step: StepOverview) -> str:
    """Return how much of a checkpoint is there, how fast it grows and how large the last one was.

    No share is told: an incremental one may have much less to write.
    """
    text = f"{iec(step.own_bytes)} so far"
    if speed := view.bytes_per_second.get(step.name):
        text += f" at {iec(round(speed))}/s"
    if view.expected_bytes is not None:
        text += f" (last one: {iec(view.expected_bytes)})"
    return text


class LinesTeller:
    """Prints how the run stands, then a line for each change."""

    def begin(self, view: RunView) -> None:
        """Tell what there is at first."""
        for line in head_lines(view, view.at):
            click.echo("".join(text for text, _ in line))

    def go_on(self, view: RunView, found: Sequence[Change]) -> None:
        """Print the changes."""
        for change in found:
            if change.what == "progress" and is_quiet():
                continue
            step, text = change.step, _WORDS[change.what]
            if change.what in ("saving", "progress"):
                text += f", {progress_text(view, step)}"
            elif change.what == "committed":
                text += f", {iec(step.own_bytes)}"
            elif change.what == "damaged":
                text += f": {printable(step.problem)}"
            click.echo(f"{_clock(view.at)}  {printable(step.name)}: {text}")

    def fail(self, error: StorageError) -> None:
        """Print what failed."""
        click.echo(f"{_clock(time.time())}  {printable(str(error))}; asking again", err=True)

    def wait(self, seconds: float) -> None:
        """Wait until the next look."""
        time.sleep(seconds)

    def end(self) -> None:
        """Do nothing: every line stands by itself."""


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


class ScreenTeller:
    """Keeps a table on a terminal up to date; ages grow between looks."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = stdout_console() if console is None else console
        self._view: RunView | None = None
        self._failure = ""
        self._live = Live(
            get_renderable=self._picture, console=self._console, auto_refresh=False, screen=False
        )

    def begin(self, view: RunView) -> None:
        """Show the run."""
        self._view = view
        self._live.start(refresh=True)

    def go_on(self, view: RunView, found: Sequence[Change]) -> None:
        """Show the run as it is now; what has changed is seen there."""
        self._view, self._failure = view, ""
        self._live.refresh()

    def fail(self, error: StorageError) -> None:
        """Show what failed below what was seen last."""
        self._failure = f"{error}; asking again"
        self._live.refresh()

    def wait(self, seconds: float) -> None:
        """Wait until the next look, while ages grow."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _SECONDS))
            self._live.refresh()

    def end(self) -> None:
        """Leave the last picture."""
        self._live.stop()

    def _picture(self) -> Group:
        if self._view is None:
            return Group()
        now, width = time.time(), self._console.width
        head = head_lines(self._view, now)
        room = max(1, self._console.height - len(head) - _BESIDE_TABLE)
        shown = self._view.steps[-room:]
        table = steps_table(shown, now, width)
        if isinstance(table, Lines):  # two for some
            shown = shown[-max(1, room // 2) :]
            table = steps_table(shown, now, width)
        parts = [Lines([*head, plain("")]), table]
        if older := len(self._view.steps) - len(shown):
            parts.append(Lines([plain(f"... and {older:,} older", "dim")]))
        if self._failure:
            parts.append(Lines([plain(""), plain(printable(self._failure), "red")]))
        return Group(*parts)
