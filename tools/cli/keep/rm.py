"""``dtckpt rm``: delete checkpoints."""

from __future__ import annotations

from typing import Any

import click

from ..common.console import printable
from ..common.options import (
    PLACE,
    debug_option,
    dry_run_option,
    split_place,
    store_at,
    store_option,
)
from ..common.telling import json_option, print_json, quiet_option, say


@click.command()
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...", type=PLACE)
@dry_run_option("Delete nothing; only find out whether anything forbids it.")
@json_option
@store_option()
@quiet_option
@debug_option
def rm(checkpoints: tuple[str, ...], dry_run: bool, as_json: bool, option: dict[str, Any]) -> None:
    """Delete each CHECKPOINT, its manifest before its data.

    Nothing is deleted where one of them is not there, is pinned, or has files to which others
    refer that stay. What a run keeps beside it goes, too.

    \b
    Examples:
      dtckpt rm run/step-100 --dry-run
      dtckpt rm run/step-100
    """
    from ....checkpoint.runs.pruning import remove

    urls: list[str] = []
    for is_trial in (True, dry_run):
        urls.clear()
        for checkpoint in checkpoints:
            root, name = split_place(checkpoint)
            with store_at(root, option) as store:
                remove(store, name, dry_run=is_trial)
                urls.append(f"{store.url}/{name}")
                if not (is_trial or as_json):
                    say(f"{printable(urls[-1])}: deleted")
    if as_json:
        print_json("removal", {"urls": urls, "dry_run": dry_run})
    elif dry_run:
        say(f"{', '.join(map(printable, checkpoints))}: could be deleted")
