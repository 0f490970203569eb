"""``dtckpt pin``: checkpoints that stay for good."""

from __future__ import annotations

from typing import Any

import click

from ..common.console import printable
from ..common.options import PLACE, debug_option, split_place, store_at, store_option
from ..common.telling import json_option, print_json, quiet_option, say


@click.command()
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...", type=PLACE)
@click.option("--remove", is_flag=True, help="Take the pins away.")
@json_option
@store_option()
@quiet_option
@debug_option
def pin(checkpoints: tuple[str, ...], remove: bool, as_json: bool, option: dict[str, Any]) -> None:
    """Keep CHECKPOINT for good, whatever the rules of its run say.

    An empty object beside it, which ends in .pinned, says so to CheckpointManager, prune and rm.

    \b
    Examples:
      dtckpt pin run/step-100
      dtckpt pin run/step-100 run/step-200 --remove
    """
    from ....checkpoint.runs.pruning import pin as pin_one

    urls: list[str] = []
    for checkpoint in checkpoints:
        root, name = split_place(checkpoint)
        with store_at(root, option) as store:
            pin_one(store, name, is_pinned=not remove)
            urls.append(f"{store.url}/{name}")
            if not as_json:
                say(f"{printable(urls[-1])}: {'not ' if remove else ''}pinned")
    if as_json:
        print_json("pins", {"urls": urls, "pinned": not remove})
