"""The groups of an optimizer as ranks with other parameters have them, brought together.

Stages of a pipeline have optimizers of one name over other parameters. Groups with the same
settings become one; a parameter that several ranks have must have the same settings on all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtckpt.errors import LayoutMismatch

from ..ranks.text import ranks_text
from ..state.limits import shown
from ..state.subclass_node import SUBCLASS, note_of
from ..state.tree import DICT_TAGS, Node, children, tag_of, tensor_names

NodeOfRanks = tuple[tuple[int, ...], Node]
"""Ranks with the same node."""


@dataclass(slots=True, eq=False)
class _Group:
    ranks: tuple[int, ...]
    settings: Mapping[Any, Node]
    text: str
    params: dict[str, Node] = field(default_factory=dict[str, Node])


def merge_groups(nodes: list[NodeOfRanks], name: str) -> Node:
    """Return the list of the groups of all ranks; LayoutMismatch where they contradict."""
    merged: list[_Group] = []
    home: dict[str, _Group] = {}
    for ranks, node in nodes:
        used: list[_Group] = []
        for position, (_, _, item) in enumerate(children(node)):
            if tag_of(node) != "list" or tag_of(item) not in DICT_TAGS:
                raise differ(name, nodes[0], (ranks, node))
            settings = {key: child for key, _, child in children(item)}
            params = settings.pop("params")["list"]
            group = _alike(merged, settings, position, used)
            if group is None:
                group = _Group(ranks, settings, json.dumps(settings))
                merged.append(group)
            used.append(group)
            if merged.index(group) != position and any(map(_has_tensors, settings.values())):
                raise LayoutMismatch(
                    f"{name}/{position}: ranks have other groups of parameters, and a tensor among "
                    f"their settings, here on {ranks_text(ranks)}; use numbers for tensors, or "
                    "give these optimizers different names"
                )
            for param in params:
                first = home.setdefault(json.dumps(param), group)
                if first.text != group.text:
                    raise LayoutMismatch(
                        f"{name}: {param} has other settings on {ranks_text(first.ranks)} than on "
                        f"{ranks_text(ranks)}: {_differing(first, group)}. Settings count as "
                        "replicated: make them equal, or give the optimizers different names"
                    )
                first.params.setdefault(json.dumps(param), param)
    return {"list": [_node(group) for group in merged]}


def differ(name: str, one: NodeOfRanks, other: NodeOfRanks) -> LayoutMismatch:
    """Return the error that a value is not the same on all ranks."""
    return LayoutMismatch(
        f"value {name!r} differs between ranks: {_shorten(one[1])} on {ranks_text(one[0])}, "
        f"{_shorten(other[1])} on {ranks_text(other[0])}. Values count as replicated: "
        "make them equal, or wrap them in PerRank, which gives each rank its own back; on other "
        "ranks or in other numbers PerCoordinate(value, mesh, axes=...) goes by places on a mesh, "
        "and PerCoordinate(value, axes=()) by what all share"
    )


def _alike(
    merged: list[_Group], settings: Mapping[Any, Node], position: int, used: list[_Group]
) -> _Group | None:
    """Return a group with the same settings that is not another one of the same rank."""
    text = json.dumps(settings)
    at_place = merged[position : position + 1]
    for group in (*at_place, *merged):
        if group.text == text and group not in used:
            return group
    return None


def _node(group: _Group) -> Node:
    fields = {**group.settings, "params": {"list": list(group.params.values())}}
    if all(type(key) is str for key in fields):
        return {"dict": fields}
    return {"items": [[key, node] for key, node in fields.items()]}


def _has_tensors(node: Node) -> bool:
    return any(True for _ in tensor_names(node))


def _differing(one: _Group, other: _Group) -> str:
    keys = [k for k in one.settings if one.settings[k] != other.settings.get(k)]
    return ", ".join(
        f"{key} is {_shorten(one.settings[key])} and {_shorten(other.settings.get(key))}"
        for key in keys
    )


def _shorten(node: Node) -> str:
    if isinstance(node, dict) and tag_of(node) == SUBCLASS:
        note = note_of(node)
        return f"a {note.text} {note.dtype}{list(note.size)} with {shown(note.context)}"
    text = json.dumps(node)
    return text if len(text) <= 80 else text[:77] + "..."
