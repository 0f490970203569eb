"""The leaves of a saved state under the flat names of torch.distributed.checkpoint.

Its planner joins the keys of dicts by dots, and looks into a list only where there are tensors or
dicts in it; any other list, and every tuple, is one value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dtckpt.errors import LayoutMismatch

from ..state.limits import shown
from ..state.tree import DICT_TAGS, Node, children, tag_of


class FlatLeaf(NamedTuple):
    """A tensor, or a value that is read as one."""

    path: tuple[str | int, ...]
    """Keys as text, and positions in lists."""
    node: Node

    @property
    def tensor(self) -> str | None:
        """Name of the tensor in the checkpoint; None for a value."""
        return self.node["tensor"] if tag_of(self.node) == "tensor" else None


def flat_leaves(
    tree: Node, where: str, remedy: str, *, rank: int | None = None
) -> dict[str, FlatLeaf]:
    """Return the leaves of a tree by their flat names; a dict of nothing is one, too.

    Of what ranks keep for themselves that of ``rank``; without one, each rank is a key. Raises
    LayoutMismatch, with a ``remedy``, where two leaves have one name.
    """
    found: dict[str, FlatLeaf] = {}
    for leaf in _leaves(tree, (), rank):
        name = ".".join(map(str, leaf.path))
        if name in found:
            raise LayoutMismatch(
                f"{where}: {found[name].path} and {leaf.path} would both be called {shown(name)}; "
                f"{remedy}"
            )
        found[name] = leaf
    return found


def _leaves(node: Node, path: tuple[str | int, ...], rank: int | None) -> Iterator[FlatLeaf]:
    tag = tag_of(node)
    if tag == "per_rank" and rank is not None:
        if str(rank) in node[tag]:
            yield from _leaves(node[tag][str(rank)], path, rank)
        return
    inner = children(node)
    if inner and tag in (*DICT_TAGS, "per_rank"):
        for key, _, child in inner:
            yield from _leaves(child, (*path, str(key)), rank)
    elif inner and tag == "list" and _has_parts(node):
        for position, _, child in inner:
            yield from _leaves(child, (*path, position), rank)
    else:
        yield FlatLeaf(path, node)


def _has_parts(node: Node) -> bool:
    """Whether a list holds tensors or dicts, lists in it included."""
    tags = (*DICT_TAGS, "per_rank", "tensor")
    return any(
        tag_of(child) in tags or (tag_of(child) == "list" and _has_parts(child))
        for _, _, child in children(node)
    )
