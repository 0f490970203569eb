"""All nodes of a tree by name, for callers that look for many of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .tree import TENSORS, Node, children

ABSENT: Any = object()
"""Stands for a node that is not there; None is a node."""


@dataclass(slots=True)
class TreeIndex:
    """The nodes of a tree."""

    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    """Every node by its name, containers included; the root has the empty name."""
    leaves: list[str] = field(default_factory=list[str])
    """Names of all leaves in their order; empty containers are leaves too."""

    def find(self, name: str) -> Node:
        """Return a node, or ABSENT."""
        return self.nodes.get(name, ABSENT)

    def leaves_of(self, name: str) -> Iterator[str]:
        """Yield the names of the leaves at or below a node that is there."""
        inner = children(self.nodes[name])
        if not inner:
            yield name
        for _, component, _ in inner:
            yield from self.leaves_of(below(name, component))


def below(name: str, component: str) -> str:
    """Return the name of a child."""
    return f"{name}/{component}" if name else component


def index_tree(tree: Node) -> TreeIndex:
    """Return every node and leaf of a tree; Corrupt where it is malformed."""
    index = TreeIndex()
    _add(index, "", tree)
    return index


def _add(index: TreeIndex, name: str, node: Node) -> None:
    index.nodes[name] = node
    inner = children(node) if isinstance(node, dict) else []
    if not inner:
        index.leaves.append(name)
        return
    start = f"{name}/" if name else ""
    for _, component, child in inner:
        full = start + component
        if isinstance(child, dict) and not child.keys() & TENSORS:
            _add(index, full, child)
        else:  # spares a call for the great majority
            index.nodes[full] = child
            index.leaves.append(full)
