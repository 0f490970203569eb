"""The tree of a checkpoint with other tensors in it: leaves taken away, and others put in."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from dtckpt.errors import LayoutMismatch

from ..state.names import key_component, key_of
from ..state.subclass_node import SUBCLASS
from ..state.tree import (
    ABSENT,
    DICT_TAGS,
    Node,
    below,
    children,
    container_node,
    tag_of,
    tags_in,
    with_children,
    with_replaced,
)


def edited(tree: Node, removed: Container[str], added: Iterable[str]) -> Node:
    """Return a tree without some leaves, and with tensors of some new names.

    Containers that become empty go; lists that change become dicts, with the same names.
    LayoutMismatch where a name is none, or something else stands there.
    """
    kept = _edited(tree, "", removed, [(name, name.split("/")) for name in added])
    return container_node("dict", []) if kept is ABSENT else kept


def with_moved_subclasses(
    old: Node, new: Node, stored: Callable[[str], object], moved: Callable[[str], object]
) -> Node:
    """Return a new tree in which tensor subclasses that were moved as a whole are such again.

    Their inner tensors stand in a dict there, under the same attributes. ``stored`` tells of a
    tensor of the old tree what it is, ``moved`` the same of one that a rule has put into the new
    one, or None where it is none or has other elements.
    """
    if SUBCLASS not in tags_in(old):
        return new
    known: dict[object, Node] = {}
    for node in _subclasses(old):
        known.setdefault(_identity(node, stored), node)

    def replaced(node: Node) -> Node | None:
        if tag_of(node) != "dict" or not node["dict"]:
            return None
        was = known.get(_identity(node, moved))
        return None if was is None else _renamed(was, node)

    return with_replaced(new, replaced)


def _subclasses(node: Node) -> Iterator[Node]:
    if tag_of(node) == SUBCLASS:
        yield node
    for _, _, child in children(node):
        yield from _subclasses(child)


def _identity(node: Node, told: Callable[[str], object]) -> object:
    """Return what a tensor is, or a container by its keys; of others what equals nothing."""
    tag = tag_of(node)
    if tag == "tensor":
        found = told(node[tag])
        return object() if found is None else found
    if tag not in ("dict", SUBCLASS):
        return object()
    return tuple((key, _identity(child, told)) for key, _, child in children(node))


def _renamed(was: Node, node: Node) -> Node:
    """Return a subclass with the tensors of a dict of the same structure."""
    if tag_of(was) != SUBCLASS:
        return node
    pairs = zip(children(was), children(node), strict=True)
    return with_children(
        was, [(key, _renamed(one, other)) for (key, _, one), (_, _, other) in pairs]
    )


_Added = list[tuple[str, list[str]]]
"""Names, with the components that are still to be gone down."""


def _edited(node: Node, name: str, removed: Container[str], added: _Added) -> Node:
    inner = children(node)
    if not inner:
        if name in removed:
            node = ABSENT
        elif added and tag_of(node) in DICT_TAGS:
            node = ABSENT  # an empty dict takes what comes
        elif added:
            raise LayoutMismatch(f"{added[0][0]!r} cannot be made: a value stands at {name!r}")
        return _container(name, added) if node is ABSENT and added else node
    by_component: dict[str, _Added] = {}
    for full, (first, *rest) in added:
        by_component.setdefault(first, []).append((full, rest))
    items: list[tuple[str | int, Node]] = []
    for key, component, child in inner:
        below_it = by_component.pop(component, [])
        if any(not rest for _, rest in below_it) and children(child):
            raise LayoutMismatch(f"{below_it[0][0]!r} cannot be made: a container stands there")
        made = _edited(child, below(name, component), removed, below_it)
        if made is not ABSENT:
            items.append((key, made))
    tag = tag_of(node)
    if tag == SUBCLASS:
        if not by_component and len(items) == len(inner):
            return with_children(node, items)
        tag = "dict"  # its class could not make it of these
    if tag in ("list", "tuple") and (by_component or len(items) < len(inner)):
        items = [(str(key), child) for key, child in items]
        tag = "dict"
    items += [(_key(c, rest), _container(below(name, c), rest)) for c, rest in by_component.items()]
    if tag == "per_rank" and by_component:
        raise LayoutMismatch(f"{name!r}: what each rank keeps for itself takes no tensors")
    if tag == "dict" and any(isinstance(key, int) for key, _ in items):
        tag = "items"
    return container_node(tag, items) if items else ABSENT


def _container(name: str, added: _Added) -> Node:
    """Return the node of new names that have nothing beside them."""
    if any(not rest for _, rest in added):
        if len(added) > 1:
            raise LayoutMismatch(f"{name!r} cannot be both a tensor and above others")
        return {"tensor": added[0][0]}
    by_component: dict[str, _Added] = {}
    for full, (first, *rest) in added:
        by_component.setdefault(first, []).append((full, rest))
    items = [(_key(c, rest), _container(below(name, c), rest)) for c, rest in by_component.items()]
    tag = "items" if any(isinstance(key, int) for key, _ in items) else "dict"
    return container_node(tag, items)


def _key(component: str, added: _Added) -> str | int:
    """Return the key of a new component; LayoutMismatch where it is none."""
    try:
        key = key_of(component)
    except ValueError:
        key = ""
    if not component or key_component(key) != component:
        raise LayoutMismatch(f"{added[0][0]!r} is no name of a tensor: {component!r} is no key")
    return key
