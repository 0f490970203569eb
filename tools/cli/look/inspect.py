"""``dtckpt inspect``: what a checkpoint holds, from its manifest alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import NotCommitted

from ..common.options import debug_option, mapping_option, store_at, store_option
from ..common.telling import json_option, print_json, quiet_option

if TYPE_CHECKING:
    from ....checkpoint import Manifest, MappingTable, Step
    from ....storage import Store


@click.command()
@click.argument("checkpoint")
@json_option
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="PATTERN",
    help="Only tensors and values whose name matches, such as 'model/*.weight'. Repeatable.",
)
@click.option("--values/--no-values", default=True, help="Whether to show what is not a tensor.")
@click.option("--draw", is_flag=True, help="Draw instead which rank held which part of a tensor.")
@mapping_option
@store_option()
@quiet_option
@debug_option
def inspect(
    checkpoint: str,
    as_json: bool,
    names: tuple[str, ...],
    values: bool,
    draw: bool,
    mapping: MappingTable | None,
    option: dict[str, Any],
) -> None:
    """Show what CHECKPOINT holds: structure, shapes, dtypes, bytes, layouts and files.

    Reads the manifest only. Where CHECKPOINT is the directory of a run, its committed checkpoints
    are listed. In patterns * matches any characters, / included.
    """
    from ....checkpoint import read_manifest

    if draw and as_json:
        raise click.UsageError("--draw draws for people; --json lists the layouts, too")

    with store_at(checkpoint, option) as store:
        try:
            manifest = read_manifest(store)
        except NotCommitted:
            steps = _steps(store)
            if not steps:
                raise
            _show_run(store, steps, as_json=as_json)
            return
        if mapping is not None:
            manifest = mapping.applied_to(manifest, store.url)
        if draw:
            from .inspect_pictures import show_layouts

            show_layouts(store.url, manifest, names)
            return
        _show_checkpoint(store, manifest, names, values=values, as_json=as_json)


def _steps(store: Store) -> list[Step]:
    from ....checkpoint import committed_steps

    return committed_steps(store)


def _show_run(store: Store, steps: list[Step], *, as_json: bool) -> None:
    if as_json:
        listed = [{"number": s.number, "name": s.name, "url": s.url} for s in steps]
        print_json("run", {"url": store.url, "steps": listed})
        return
    from .inspect_text import show_run

    show_run(store.url, steps)


def _show_checkpoint(
    store: Store, manifest: Manifest, names: tuple[str, ...], *, values: bool, as_json: bool
) -> None:
    if as_json:
        from .inspect_json import checkpoint_document

        print_json("checkpoint", checkpoint_document(store.url, manifest, names, values=values))
        return
    from .inspect_text import show_checkpoint

    show_checkpoint(store.url, manifest, names, values=values)
