"""``dtckpt watch``: a run as it saves."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import click

from dtckpt.errors import StorageError

from ..common.exit_codes import INTERRUPTED
from ..common.options import PLACE, debug_option, store_at, store_option
from ..common.telling import print_json, quiet_option, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ....checkpoint.runs.watching import Change, RunView, RunWatch


class Teller(Protocol):
    """Tells what a run looks like, and what becomes of it."""

    def begin(self, view: RunView) -> None:
        """Tell what there is at first."""
        ...

    def go_on(self, view: RunView, found: Sequence[Change]) -> None:
        """Tell what there is now, and what has changed."""
        ...

    def fail(self, error: StorageError) -> None:
        """Tell that the storage could not be looked at."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until the next look."""
        ...

    def end(self) -> None:
        """Leave the terminal as it was."""
        ...


@click.command()
@click.argument("root", type=PLACE)
@click.option("--once", is_flag=True, help="Tell how the run stands now, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait between two looks.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document a line: the run first, then every change.",
)
@store_option()
@quiet_option
@debug_option
@click.pass_context
def watch(
    ctx: click.Context,
    root: str,
    once: bool,
    interval: float,
    as_json: bool,
    option: dict[str, Any],
) -> None:
    """Watch the run at ROOT as it saves.

    What is being saved and how much of it is there, when the last save was, how long it is between
    two, and what ls tells of every checkpoint. On a terminal a table that is kept up to date; into
    a pipe, or with --json, a line for each change. A storage that fails is asked again. In object
    stores files are counted once they are complete. Ctrl-C ends it.

    \b
    Examples:
      dtckpt watch run --once
      dtckpt watch run --once --json
    """
    from ....checkpoint.runs.overview import no_run
    from ....checkpoint.runs.watching import RunWatch

    with store_at(root, option, "ROOT") as store:
        runs = RunWatch(store)
        view = runs.look()
        if not view.steps:
            error = no_run(store)
            if once:
                raise error
            warn(f"{error}; waiting for the first save")
        teller = _Documents() if as_json else _teller(once)
        try:
            teller.begin(view)
            if not once:
                _follow(runs, view, teller, interval)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        finally:
            teller.end()


def _teller(once: bool) -> Teller:
    from .watch_text import LinesTeller, ScreenTeller

    return ScreenTeller() if sys.stdout.isatty() and not once else LinesTeller()


def _follow(runs: RunWatch, view: RunView, teller: Teller, interval: float) -> None:
    from ....checkpoint.runs.watching import changes

    while True:
        teller.wait(interval)
        try:
            now = runs.look()
        except StorageError as error:
            teller.fail(error)
            continue
        teller.go_on(now, list(changes(view, now)))
        view = now


class _Documents:
    """Prints JSON, a document a line."""

    def begin(self, view: RunView) -> None:
        steps = [asdict(step) for step in view.steps]
        document = {"url": view.url, "seconds_between": view.seconds_between, "steps": steps}
        print_json("run", document, is_line=True)

    def go_on(self, view: RunView, found: Sequence[Change]) -> None:
        for change in found:
            document = {"at": view.at, "what": change.what, "step": asdict(change.step)}
            print_json("change", document, is_line=True)

    def fail(self, error: StorageError) -> None:
        print_json("failure", {"at": time.time(), "message": str(error)}, is_line=True)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def end(self) -> None:
        pass
