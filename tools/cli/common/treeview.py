"""The saved structure as rows to print: a tree of containers, tensors and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....checkpoint.state.names import Path, join
from ....checkpoint.state.selecting import Selection
from ....checkpoint.state.subclass_node import SUBCLASS, note_of
from ....checkpoint.state.tree import TENSORS, children, tag_of
from ....checkpoint.state.values import Node
from .console import printable
from .valuetext import value_text

if TYPE_CHECKING:
    from ....checkpoint.files.stored_tensor import StoredTensor

Guides = tuple[str, str, str, str]
"""Texts of equal width for nothing, a line that goes on, a fork and an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A container, tensor or value of the saved structure."""

    label: str
    """Last component of the name."""
    text: str = ""
    """A value, or what kind of container this is."""
    tensor: StoredTensor | None = None
    children: tuple[Branch, ...] = ()


def matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return whether a name is selected by any of some patterns; all are if there are none."""
    return Selection(patterns).__contains__ if patterns else lambda _: True


def view(
    tree: Node,
    tensors: Mapping[str, StoredTensor],
    *,
    wanted: Callable[[str], bool],
    values: bool,
) -> Branch:
    """Return the part of a tree whose leaves have wanted names, without values if so asked."""
    walk = _Walk(tensors, wanted, values)
    return walk.branch(tree, ()) or Branch(label="")


@dataclass(frozen=True, slots=True)
class _Walk:
    tensors: Mapping[str, StoredTensor]
    wanted: Callable[[str], bool]
    values: bool

    def branch(self, node: Node, path: Path) -> Branch | None:
        tag = tag_of(node)
        label = printable(path[-1]) if path else ""
        if tag in TENSORS:
            return self.tensor(node[tag], label) if self.wanted(node[tag]) else None
        inner = children(node)
        if not inner or is_plain_sequence(node):
            if not self.values or not (path and self.wanted(join(path))):
                return None
            return Branch(label=label, text=value_text(node))
        found = [self.branch(child, (*path, component)) for _, component, child in inner]
        shown = tuple(branch for branch in found if branch is not None)
        text = _KINDS[tag](len(inner)) if tag in _KINDS else ""
        if tag == SUBCLASS:
            text = printable(note_of(node).text)
        return Branch(label=label, text=text, children=shown) if shown else None

    def tensor(self, name: str, label: str) -> Branch:
        return Branch(label=label, tensor=self.tensors.get(name))


_KINDS: dict[str | None, Callable[[int], str]] = {
    "list": lambda n: f"list of {n:,}",
    "tuple": lambda n: f"tuple of {n:,}",
    "per_rank": lambda _: "per rank",
}


def is_plain_sequence(node: Node) -> bool:
    """Whether a node is a list or tuple of values alone, which is shown in one line."""
    if tag_of(node) not in ("list", "tuple"):
        return False
    return all(
        is_plain_sequence(child) or (tag_of(child) not in TENSORS and not children(child))
        for _, _, child in children(node)
    )


def plain_values(node: Node, path: Path = ()) -> Iterator[tuple[str, Node]]:
    """Yield (name, node) of everything that is not a tensor; plain sequences are one value."""
    inner = children(node)
    if tag_of(node) in TENSORS:
        return
    if not inner or is_plain_sequence(node):
        yield join(path), node
        return
    for _, component, child in inner:
        yield from plain_values(child, (*path, component))


def rows(root: Branch, guides: Guides) -> Iterator[tuple[str, Branch]]:
    """Yield (guide lines, branch) of everything below ``root``, in order."""
    space, line, fork, end = guides

    def below(branch: Branch, lead: str) -> Iterator[tuple[str, Branch]]:
        for i, child in enumerate(branch.children):
            last = i == len(branch.children) - 1
            yield lead + (end if last else fork), child
            yield from below(child, lead + (space if last else line))

    return below(root, "")
