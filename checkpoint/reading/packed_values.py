"""A checkpoint whose packed values are nodes for each value, for what looks into these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..state.packing import as_bytes, unpack
from ..state.tree import PACKED, Node, packed_name, plain_node, tag_of, tensor_names, with_replaced


def with_plain_values(
    manifest: Manifest, data: StoredData, expands: Callable[[Any], bool] = lambda _: True
) -> Manifest:
    """Return a checkpoint without those packed values that ``expands`` says of, which are read."""
    tree = with_plain_nodes(manifest.tree, manifest, data, expands)
    if tree is manifest.tree:
        return manifest
    names = set(tensor_names(tree))
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name in names}
    return replace(manifest, tree=tree, tensors=tensors, stored=manifest.stored or manifest)


def with_plain_nodes(
    tree: Node, manifest: Manifest, data: StoredData, expands: Callable[[Any], bool]
) -> Node:
    """Return a part of a tree, in the same way."""
    if not manifest.packed_names:
        return tree

    def plain(node: Node) -> Node | None:
        if tag_of(node) != PACKED:
            return None
        from .to_tensors import read_whole  # which imports torch

        name = packed_name(node)
        value = unpack(as_bytes(read_whole(data, manifest.tensors[name])), name)
        return plain_node(value, name) if expands(value) else node

    return with_replaced(tree, plain)


def holds_dicts(value: Any) -> bool:
    """Whether a packed value is a dict, or has one in it.

    Other programs give what lies in dicts names of its own, and take lists for one value.
    """
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list | tuple):
        return False
    kinds = set(map(type, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not any(issubclass(kind, Mapping | list | tuple) for kind in kinds):
        return False
    return any(map(holds_dicts, value))  # pyright: ignore[reportUnknownArgumentType]
