"""The leaves of a saved state under the flat names of torch.distributed.checkpoint.

Its planner joins the keys of dicts by dots, and looks into a list only where there are tensors or
dicts in it; any other list, and every tuple, is one value. Dicts of nothing, which it leaves out,
are values here, and a list that has no others is one, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dtckpt.errors import LayoutMismatch

from ..state.limits import shown
from ..state.names import rank_component
from ..state.subclass_node import SUBCLASS
from ..state.tree import DICT_TAGS, Node, below, children, tag_of

_WITH_KEYS = (*DICT_TAGS, "per_rank", SUBCLASS)
"""Tags of containers whose children have keys."""


class FlatLeaf(NamedTuple):
    """A tensor, or a value that is read as one."""

    path: tuple[str | int, ...]
    """Keys as text, and positions in lists."""
    node: Node
    name: str
    """As in the manifest: that of its tensor, or of a value."""

    @property
    def tensor(self) -> str | None:
        """Name of the tensor in the checkpoint; None for a value."""
        return self.node["tensor"] if tag_of(self.node) == "tensor" else None


class _SameText(Exception):
    """An int key and a str key of one dict are the same text."""


def flat_leaves(
    tree: Node, where: str, remedy: str, *, rank: int | None = None
) -> dict[str, FlatLeaf]:
    """Return the leaves of a tree by their flat names; a dict of nothing is one, too.

    Of what ranks keep for themselves that of ``rank``; without one, each rank is a key. Raises
    LayoutMismatch, with a ``remedy``, where two leaves have one name, or two keys of a dict one
    text: 1 and "1".
    """
    found: dict[str, FlatLeaf] = {}
    try:
        leaves = list(_leaves(tree, (), "", rank))
    except _SameText as same:
        raise LayoutMismatch(
            f"{where}: a dict has the keys {same} and its text, which would be one; {remedy}"
        ) from None
    for leaf in leaves:
        name = ".".join(map(str, leaf.path))
        if name in found:
            raise LayoutMismatch(
                f"{where}: {found[name].path} and {leaf.path} would both be called {shown(name)}; "
                f"{remedy}"
            )
        found[name] = leaf
    return found


def _leaves(
    node: Node, path: tuple[str | int, ...], name: str, rank: int | None
) -> Iterator[FlatLeaf]:
    tag = tag_of(node)
    if tag == "per_rank" and rank is not None:
        if str(rank) in node[tag]:
            yield from _leaves(node[tag][str(rank)], path, below(name, rank_component(rank)), rank)
        return
    inner = children(node)
    if inner and tag in _WITH_KEYS:
        texts = {key for key, _, _ in inner if isinstance(key, str)}
        for key, component, child in inner:
            if isinstance(key, int) and str(key) in texts:
                raise _SameText("/".join(map(str, (*path, key))))
            yield from _leaves(child, (*path, str(key)), below(name, component), rank)
    elif inner and tag == "list" and _has_parts(node):
        for position, component, child in inner:
            yield from _leaves(child, (*path, position), below(name, component), rank)
    else:
        yield FlatLeaf(path, node, node[tag] if tag == "tensor" else name)


def _has_parts(node: Node) -> bool:
    """Whether a list holds tensors or dicts that hold something, lists in it included."""
    return any(
        tag_of(child) == "tensor"
        or (tag_of(child) in _WITH_KEYS and children(child))
        or (tag_of(child) == "list" and _has_parts(child))
        for _, _, child in children(node)
    )
