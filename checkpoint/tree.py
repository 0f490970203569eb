"""The structure of a state dict as typed JSON, so that it survives a round trip.

Containers are ``{"dict": {...}}`` (str keys), ``{"items": [[key, node], ...]}`` (any int key), the
same list under ``"ordered"`` (OrderedDict) or ``"counter"`` (Counter), ``{"list": [...]}``,
``{"tuple": [...]}`` and ``{"per_rank": {"0": node, ...}}``. Tensors are ``{"tensor": name}``, numpy
arrays ``{"ndarray": name}``. All other nodes are leaves of ``values``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dtckpt.errors import Corrupt, Unsavable

from .limits import MAX_NESTING, shown
from .names import Path, index_component, is_encodable, join, key_component, rank_component
from .stateful import Stateful, is_stateful
from .values import VALUE_TAGS, Node, decode_value, encode_value

DICTS: dict[type, str] = {
    dict: "items",
    defaultdict: "items",  # its factory is code, which a checkpoint does not hold
    OrderedDict: "ordered",
    Counter: "counter",
}
SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}
PAIRS: dict[str, type] = {"items": dict, "ordered": OrderedDict, "counter": Counter}
"""Tags of dicts that are lists of [key, node] pairs, with the type that they come back as."""
DICT_TAGS = ("dict", *PAIRS)
CONTAINERS = (*DICT_TAGS, "list", "tuple", "per_rank")
TENSORS = ("tensor", "ndarray")


@dataclass(slots=True)
class PerRank:
    """A value that every rank keeps for itself, such as the state of its random generator.

    Without it a plain tensor or value must be equal on all ranks. It is saved under the rank and
    given back to the same rank.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Flattened:
    """A state dict taken apart."""

    tree: Node
    tensors: dict[str, Any]
    """Every tensor and numpy array by name, in order of appearance."""
    has_own: bool
    """Whether something is kept for this rank alone."""


def flatten(
    state: Mapping[Any, Any],
    *,
    rank: int,
    tensor_tag: Callable[[object], str | None],
    allow_pickle: bool,
) -> Flattened:
    """Take a state dict apart into its structure and its tensors.

    ``tensor_tag`` says "tensor" or "ndarray" for what is to be stored as a tensor. Objects with
    ``state_dict()`` and ``load_state_dict()`` stand for their state dict. Raises Unsavable, with
    the name of the leaf, for what cannot be written.
    """
    return _Flattening(rank, tensor_tag, allow_pickle).run(state)


class _Flattening:
    def __init__(
        self, rank: int, tensor_tag: Callable[[object], str | None], allow_pickle: bool
    ) -> None:
        self.rank = rank
        self.tensor_tag = tensor_tag
        self.allow_pickle = allow_pickle
        self.tensors: dict[str, Any] = {}
        self.open_containers: set[int] = set()
        self.has_own = False

    def run(self, state: Mapping[Any, Any]) -> Flattened:
        return Flattened(self.node(state, ()), self.tensors, self.has_own)

    def node(self, value: Any, path: Path) -> Node:
        tag = self.tensor_tag(value)
        if tag is not None:
            name = join(path)
            if not is_encodable(name):
                raise Unsavable(
                    f"{name!a}: no data file can hold a tensor of this name, since it has half of "
                    "a surrogate pair in it, which UTF-8 has no bytes for; rename the key"
                )
            self.tensors[name] = value
            return {tag: name}
        if isinstance(value, PerRank):
            self.has_own = True
            child = self.node(value.value, (*path, rank_component(self.rank)))
            return {"per_rank": {str(self.rank): child}}
        if is_stateful(value):
            return self.node(cast(Stateful, value).state_dict(), path)
        if type(value) in DICTS or type(value) in SEQUENCES:
            return self.container(value, path)
        return encode_value(value, join(path), allow_pickle=self.allow_pickle)

    def container(self, value: Any, path: Path) -> Node:
        if id(value) in self.open_containers:
            raise Unsavable(f"{join(path)}: the container holds itself")
        if len(self.open_containers) == MAX_NESTING:
            raise Unsavable(f"{join(path)}: lies in more than {MAX_NESTING} containers")
        self.open_containers.add(id(value))
        try:
            if type(value) in SEQUENCES:
                items = [self.node(v, (*path, index_component(i))) for i, v in enumerate(value)]
                return {SEQUENCES[type(value)]: items}
            return self.dict_node(value, path)
        finally:
            self.open_containers.discard(id(value))

    def dict_node(self, value: dict[Any, Any], path: Path) -> Node:
        for key in value:
            if type(key) not in (str, int):
                raise Unsavable(
                    f"{join(path)}: the dict key {key!r} is of type {type(key).__name__}; "
                    "only str and int keys can be written"
                )
        nodes = [(key, self.node(v, (*path, key_component(key)))) for key, v in value.items()]
        tag = DICTS[type(value)]
        if tag == "items" and all(type(key) is str for key in value):
            tag = "dict"
        return container_node(tag, nodes)


def tag_of(node: Node) -> str | None:
    """Return the tag of a node that is an object, or None for a JSON scalar."""
    if type(node) is not dict:
        return None
    if len(node) == 1:
        for tag in node:
            return tag
    raise Corrupt(f"malformed tree node with the keys {shown(sorted(node))}; expected one")


def children(node: Node) -> list[tuple[str | int, str, Node]]:
    """Return (key or index, path component, node) of every child of a container node."""
    tag = tag_of(node)
    try:
        if tag == "dict":
            return [(key, key_component(key), child) for key, child in node[tag].items()]
        if tag in PAIRS:
            return [(key, key_component(_key(key)), child) for key, child in node[tag]]
        if tag in ("list", "tuple"):
            return [(i, index_component(i), child) for i, child in enumerate(node[tag])]
        if tag == "per_rank":
            return [(int(r), rank_component(int(r)), child) for r, child in node[tag].items()]
    except (AttributeError, TypeError, ValueError) as error:
        raise Corrupt(f"malformed {tag} node: {shown(error)}") from error
    if tag not in TENSORS and tag is not None and tag not in VALUE_TAGS:
        raise Corrupt(
            f"unknown tree node {shown(tag)}; expected one of {CONTAINERS + TENSORS + VALUE_TAGS}"
        )
    return []


def _key(key: object) -> str | int:
    if type(key) is str or type(key) is int:
        return key
    raise TypeError(f"{shown(key)} is no key of a dict")


def container_node(tag: str | None, items: Sequence[tuple[str | int, Node]]) -> Node:
    """Return the container node of some (key or index, node) pairs; ``children`` undoes it."""
    if tag in PAIRS:
        return {tag: [[key, node] for key, node in items]}
    if tag in ("list", "tuple"):
        return {tag: [node for _, node in items]}
    return {tag: {str(key): node for key, node in items}}


def per_rank_nodes(node: Node, path: Path = ()) -> Iterator[tuple[str, Node]]:
    """Yield (name, node) of every ``per_rank`` node."""
    if tag_of(node) == "per_rank":
        yield join(path), node
        return
    for _, component, child in children(node):
        yield from per_rank_nodes(child, (*path, component))


def tensor_names(node: Node) -> Iterator[str]:
    """Yield the names that the tensor leaves of a tree give; Corrupt where one is no name."""
    tag = tag_of(node)
    if tag in TENSORS:
        if not isinstance(node[tag], str):
            raise Corrupt(f"malformed {tag} node: {shown(node[tag])} is not a name")
        yield node[tag]
        return
    for _, _, child in children(node):
        yield from tensor_names(child)


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[str, Node]]:
    """Yield (name, node) of every leaf; empty containers are leaves too."""
    inner = children(node)
    if not inner:
        yield join(path), node
    for _, component, child in inner:
        yield from leaves(child, (*path, component))


def unflatten(
    node: Node, tensor: Callable[[str, str], Any], *, allow_pickle: bool, path: Path = ()
) -> Any:
    """Return the value of a tree; ``tensor(name, tag)`` supplies its tensors."""
    tag = tag_of(node)
    if tag in TENSORS:
        return tensor(node[tag], cast(str, tag))
    if tag not in CONTAINERS:
        return decode_value(node, join(path), allow_pickle=allow_pickle)
    built = {
        key: unflatten(child, tensor, allow_pickle=allow_pickle, path=(*path, component))
        for key, component, child in children(node)
    }
    if tag in ("list", "tuple"):
        return list(built.values()) if tag == "list" else tuple(built.values())
    return PAIRS[tag](built) if tag in PAIRS else built
