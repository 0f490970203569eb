"""``dtckpt gc``: delete what killed saves have left."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import NotCommitted

from ..common.console import age, count, printable
from ..common.options import PLACE, debug_option, dry_run_option, duration, store_at, store_option
from ..common.telling import json_option, print_json, quiet_option, say

if TYPE_CHECKING:
    from ....storage import Store


@click.command()
@click.argument("root", type=PLACE)
@click.option(
    "--older-than",
    callback=duration,
    default="1d",
    show_default=True,
    metavar="AGE",
    help="Only what nobody has written to for so long; more than any save takes.",
)
@dry_run_option("Delete nothing; show what would go.")
@json_option
@store_option()
@quiet_option
@debug_option
def gc(
    root: str, older_than: timedelta, dry_run: bool, as_json: bool, option: dict[str, Any]
) -> None:
    """Delete what saves and deletions that were killed have left at ROOT.

    ROOT is a checkpoint, a run, or a directory of runs. Data files that no manifest names go, and
    unfinished files and uploads; committed checkpoints are never touched. A save that is under
    way and writes nothing for as long as --older-than is taken for dead.

    \b
    Examples:
      dtckpt gc run --dry-run
      dtckpt gc run --older-than 12h
    """
    from ....checkpoint import clean

    with store_at(root, option, "ROOT") as store:
        gone = clean(store, older_than=older_than, dry_run=dry_run)
        if not gone:
            _check_something(store)
        if as_json:
            print_json("collection", {"url": store.url, "dry_run": dry_run, "gone": gone})
            return
        for name in gone:
            say(f"{printable(name)}: {'would be deleted' if dry_run else 'deleted'}")
        told = f"{count(len(gone), 'leftover')} {'would go' if dry_run else 'deleted'}"
        say(f"{told}; what was written to in the last {age(older_than.total_seconds())} stays")


def _check_something(store: Store) -> None:
    """Raise NotCommitted where nothing is at all: the path is a mistake then."""
    from ....checkpoint.files.foreign import what_is_there

    level = store.level()
    if not level.objects and not level.folders:
        raise NotCommitted(what_is_there(store))
