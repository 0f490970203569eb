"""``dtckpt prune``: delete the checkpoints of a run that need not stay."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from ..common.console import count, printable
from ..common.options import PLACE, debug_option, dry_run_option, duration, store_at, store_option
from ..common.telling import json_option, print_json, quiet_option, say

if TYPE_CHECKING:
    from ....checkpoint.runs.pruning import Pruned


@click.command()
@click.argument("run", type=PLACE)
@click.option("--keep-last", type=click.IntRange(1), metavar="K", help="So many of the newest.")
@click.option(
    "--keep-every", type=click.IntRange(1), metavar="N", help="Those whose step is a multiple of N."
)
@click.option("--keep-younger-than", callback=duration, metavar="AGE", help="Such as 36h or 7d.")
@click.option("--prefix", help="What precedes the step in the names; that of all by default.")
@dry_run_option("Delete nothing; show what would go.")
@json_option
@store_option()
@quiet_option
@debug_option
def prune(
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_younger_than: timedelta | None,
    prefix: str | None,
    dry_run: bool,
    as_json: bool,
    option: dict[str, Any],
) -> None:
    """Delete the checkpoints of RUN that no rule keeps.

    Those stay that any rule keeps, and always the newest that is whole, those that are pinned, and
    those to whose files others refer that stay. What is newer than the newest whole one is left
    alone. No job should save into RUN at that time by other rules.

    \b
    Examples:
      dtckpt prune run --keep-last 2 --keep-every 1000 --dry-run
      dtckpt prune run --keep-last 1
    """
    from ....checkpoint import Keep
    from ....checkpoint.runs.pruning import prune as prune_run

    keep = Keep(last=keep_last, every=keep_every, younger_than=keep_younger_than)
    if keep.is_all:
        raise click.UsageError("give a rule, such as --keep-last 3: without one all would stay")
    with store_at(run, option, "RUN") as store:
        try:
            done = prune_run(store, keep, prefix=prefix, dry_run=dry_run)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="'--prefix'") from error
        if as_json:
            print_json("pruning", {"url": store.url, "dry_run": dry_run} | asdict(done))
        else:
            _tell(done, dry_run=dry_run)


def _tell(done: Pruned, *, dry_run: bool) -> None:
    for name in done.gone:
        say(f"{printable(name)}: {'would be deleted' if dry_run else 'deleted'}")
    for name, by in done.needed.items():
        say(f"{printable(name)}: stays, since {printable(', '.join(by))} refers to its files")
    for name, why in done.refused.items():
        say(f"{printable(name)}: stays: {why}")
    gone = "would go" if dry_run else "deleted"
    say(f"{count(len(done.gone), 'checkpoint')} {gone}, {len(done.kept):,} kept")
