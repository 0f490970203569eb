"""``dtckpt ls``: the checkpoints of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..common.exit_codes import FINDING
from ..common.options import PLACE, debug_option, store_at, store_option
from ..common.telling import json_option, print_json, quiet_option


@click.command()
@click.argument("root", type=PLACE)
@json_option
@store_option()
@quiet_option
@debug_option
@click.pass_context
def ls(ctx: click.Context, root: str, as_json: bool, option: dict[str, Any]) -> None:
    """List the checkpoints of the run at ROOT.

    For each its step, its age, the bytes of its own files, and whether it is committed, incomplete
    (a save under way, or one that died) or damaged; which earlier ones it refers to, and whether
    it is pinned. Manifests are read and files compared with them by size; dtckpt verify reads all.

    Exits with 1 where one is damaged.

    \b
    Examples:
      dtckpt ls run
      dtckpt ls run --json
    """
    from ....checkpoint.runs.overview import look_over, no_run

    with store_at(root, option, "ROOT") as store:
        steps = look_over(store)
        if not steps:
            raise no_run(store)
        if as_json:
            print_json("run", {"url": store.url, "steps": [asdict(step) for step in steps]})
        else:
            from .ls_text import show_steps

            show_steps(store.url, steps)
    if any(step.state == "damaged" for step in steps):
        ctx.exit(FINDING)
