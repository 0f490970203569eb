"""``dtckpt edit``: other metadata and other names, without touching data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..common.console import count, printable
from ..common.options import PLACE, debug_option, key_values, store_at, store_option
from ..common.telling import json_option, print_json, quiet_option, say


def _values(_ctx: click.Context, _param: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
    return key_values(texts)


def _names(_ctx: click.Context, _param: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    return key_values(texts, is_text=True)


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.option(
    "--set-metadata",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_values,
    help="Set an entry of the metadata; JSON where VALUE is JSON, else text. Repeatable.",
)
@click.option(
    "--remove-metadata", multiple=True, metavar="KEY", help="Remove an entry. Repeatable."
)
@click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    callback=_names,
    help="Give tensors other names. {x} stands for any characters but . and /, {rest*} for any; "
    "both sides have the same ones. Repeatable.",
)
@json_option
@store_option()
@quiet_option
@debug_option
def edit(
    checkpoint: str,
    set_metadata: dict[str, Any],
    remove_metadata: tuple[str, ...],
    rename: dict[str, str],
    as_json: bool,
    option: dict[str, Any],
) -> None:
    """Change metadata of CHECKPOINT, and names of its tensors.

    Data are not touched: a new manifest takes the place of the old one in one step, unless somebody
    else has changed it meanwhile. Checkpoints of other programs have to be converted first.

    \b
    Examples:
      dtckpt edit run/step-300 --set-metadata loss=1.25
      dtckpt edit run/step-300 --rename 'model/{rest*}=net/{rest*}'
    """
    from ....checkpoint import edit as edit_checkpoint

    if not (set_metadata or remove_metadata or rename):
        raise click.UsageError("nothing to do: --set-metadata, --remove-metadata or --rename")
    with store_at(checkpoint, option) as store:
        made = edit_checkpoint(
            store, set_metadata=set_metadata, remove_metadata=remove_metadata, rename=rename
        )
        if as_json:
            print_json(
                "edit",
                {"url": store.url, "metadata": made.metadata, "tensors": list(made.tensors)},
            )
            return
        num_renamed = sum(tensor.stored_as is not None for tensor in made.tensors.values())
        told = (
            f"; {count(num_renamed, 'tensor')} now named otherwise than in files" if rename else ""
        )
        say(f"{printable(store.url)}: edited{told}")
