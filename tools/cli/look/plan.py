"""``dtckpt plan``: what a load onto a mesh would cost each rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..common.options import (
    PLACE,
    debug_option,
    parse_mesh,
    parse_rule_sets,
    store_at,
    store_option,
)
from ..common.telling import bar, json_option, print_json, quiet_option
from ..write.rewrite_options import check_rules

if TYPE_CHECKING:
    from ....checkpoint import Rule
    from ....dtensor import Mesh


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.option(
    "--mesh", callback=parse_mesh, required=True, metavar="AXIS=N,...", help="The mesh of the load."
)
@click.option(
    "--placements",
    "rules",
    callback=parse_rule_sets,
    required=True,
    multiple=True,
    metavar="RULES",
    help="How tensors lie on the mesh, as 'dtckpt reshard --help' tells. Repeatable.",
)
@json_option
@store_option()
@quiet_option
@debug_option
def plan(
    checkpoint: str,
    mesh: Mesh,
    rules: tuple[Rule, ...],
    as_json: bool,
    option: dict[str, Any],
) -> None:
    """Show what a load onto a mesh would cost each rank.

    Planned as a load of CHECKPOINT plans it: bytes of the state that a rank gets, and what it reads
    for them alone, in whole blocks, of how many files, in how many requests. "shared" and
    "received" are what it reads, and gets of what others read, where the ranks of a host share:
    as they do by themselves out of object stores, and from a local disk with read_once=True. Ranks
    that cost the same have one line, with the most of these two; those that read most come first.

    Only the manifest and headers of files are read. What ranks kept for themselves is left out.

    \b
    Example:
      dtckpt plan run/step-100 --mesh dp=2,tp=2 --placements "*weight=S(0),S(1)"
    """
    check_rules(mesh, rules)
    from ....checkpoint import load_costs

    with store_at(checkpoint, option) as store, bar("planning") as on_progress:
        costs = load_costs(store, mesh, rules, on_progress=on_progress)
    if as_json:
        document = {
            "url": costs.url,
            "mesh": str(costs.mesh),
            "stored_bytes": costs.stored_bytes,
            "read_bytes": costs.read_bytes,
            "ranks": [asdict(cost) for cost in costs.ranks],
        }
        print_json("plan", document)
        return
    from .plan_text import show_costs

    show_costs(costs)
