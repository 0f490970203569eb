"""``dtckpt cat``: values of a checkpoint, and elements of its tensors."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import LayoutMismatch

from ..common.console import printable
from ..common.options import NAME, PLACE, debug_option, mapping_option, store_at, store_option
from ..common.telling import json_option, print_json, quiet_option
from ..common.treeview import plain_values
from ..common.valuetext import value_text

if TYPE_CHECKING:
    from ....checkpoint import Manifest, MappingTable
    from ....checkpoint.state.values import Node
    from ....storage import Store


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.argument("names", nargs=-1, metavar="[NAME]...", type=NAME)
@click.option("--full", is_flag=True, help="All elements of tensors, however many.")
@json_option
@mapping_option
@store_option()
@quiet_option
@debug_option
def cat(
    checkpoint: str,
    names: tuple[str, ...],
    full: bool,
    as_json: bool,
    mapping: MappingTable | None,
    option: dict[str, Any],
) -> None:
    """Print values of CHECKPOINT, and elements of tensors.

    NAME is that of a value, of a part of the state, of whose values all are printed, or a pattern
    for these; or of a tensor, with a slice or without: model/weight[0:2,:3]. Of many elements the
    first and last are read and shown. Without NAME all values are printed, and no tensors.

    With --json values are as the manifest has them, so that what JSON does not know is tagged.

    \b
    Examples:
      dtckpt cat run/step-300 step
      dtckpt cat run/step-300 'model/weight[0:2,:3]' --json
    """
    from ....checkpoint import read_manifest

    with store_at(checkpoint, option) as store:
        manifest = read_manifest(store)
        if mapping is not None:
            manifest = mapping.applied_to(manifest, store.url)
        parts = [name for name in names if name.partition("[")[0] in manifest.tensors_of_state]
        others = [name for name in names if name not in parts]
        values = {} if parts and not others else _values(store, manifest, others)
        if as_json:
            print_json(
                "values",
                {"url": store.url, "values": values, "tensors": _lists(store, manifest, parts)},
            )
            return
        if not (values or parts):
            note = f"{printable(store.url)}: no values here, only tensors; name one"
            click.echo(f"{note}, as dtckpt inspect shows them", err=True)
        is_one = len(values) + len(parts) == 1
        for name, node in values.items():
            lead = "" if is_one and name in names else f"{printable(name)}: "
            click.echo(f"{lead}{_text(node)}")
        for text in parts:
            if not is_one:
                click.echo(f"{printable(text)}:")
            click.echo(_elements(store, manifest, text, full=full))


def _values(store: Store, manifest: Manifest, names: Sequence[str]) -> dict[str, Node]:
    from ....checkpoint.state.selecting import Selection

    found = dict(plain_values(manifest.tree))
    if not names:
        return _expanded(store, manifest, found)
    selection = Selection(names)
    leaves = [*found, *manifest.tensors_of_state]
    selection.check(leaves, store.url)
    chosen = {name: node for name, node in found.items() if name in selection}
    if not chosen:
        raise LayoutMismatch(
            f"{store.url}: there are only tensors and no values below "
            f"{', '.join(map(repr, names))}; name a tensor"
        )
    return _expanded(store, manifest, chosen)


def _expanded(store: Store, manifest: Manifest, values: dict[str, Node]) -> dict[str, Node]:
    """Return values as nodes; those that are packed are read from the data files."""
    if not manifest.packed_names:
        return values
    from ....checkpoint.formats.opening import stored_data
    from ....checkpoint.reading.packed_values import with_plain_nodes

    data = stored_data(store, manifest)
    return {
        name: with_plain_nodes(node, manifest, data, lambda _: True)
        for name, node in values.items()
    }


def _text(node: Node) -> str:
    """Return a text as it is, and anything else as Python would write it."""
    return printable(node) if isinstance(node, str) else value_text(node, is_whole=True)


def _elements(store: Store, manifest: Manifest, text: str, *, full: bool) -> str:
    from ....checkpoint.examining.elements import elements_text
    from ....checkpoint.formats.opening import stored_data
    from ....checkpoint.reading.parts import parse_part

    part = parse_part(text, manifest, store.url)
    width = shutil.get_terminal_size().columns
    return elements_text(stored_data(store, manifest), part, full=full, width=width)


def _lists(store: Store, manifest: Manifest, texts: Sequence[str]) -> dict[str, Any]:
    if not texts:
        return {}
    from ....checkpoint.examining.elements import all_elements, plain_list
    from ....checkpoint.formats.opening import stored_data
    from ....checkpoint.reading.parts import parse_part

    data = stored_data(store, manifest)
    parts = {text: parse_part(text, manifest, store.url) for text in texts}
    return {
        text: {
            "dtype": part.tensor.dtype.torch_name,
            "shape": list(part.shape),
            "elements": plain_list(all_elements(data, part)),
        }
        for text, part in parts.items()
    }
