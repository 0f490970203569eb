"""``dtckpt rm``: delete checkpoints."""

from __future__ import annotations

import os
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

    by_root: dict[str, list[str]] = {}
    spelled: dict[str, str] = {}
    for root, name in map(split_place, checkpoints):
        real = root if ":/" in root else os.path.realpath(os.path.expanduser(root))
        by_root.setdefault(spelled.setdefault(real, root), []).append(name)
    urls: list[str] = []
    for is_trial in [True] if dry_run else [True, False]:
        for root, names in by_root.items():
            with store_at(root, option) as store:
                remove(store, *names, dry_run=is_trial)
                told = [f"{store.url}/{name}" for name in dict.fromkeys(names)]
            if is_trial != dry_run:
                continue
            urls += told
            for url in told if not as_json else ():
                say(f"{printable(url)}: {'could be ' if dry_run else ''}deleted")
    if as_json:
        print_json("removal", {"urls": urls, "dry_run": dry_run})
