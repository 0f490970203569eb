"""The structure of a state dict as typed JSON, so that it survives a round trip.

Containers are ``{"dict": {...}}`` (str keys), ``{"items": [[key, node], ...]}`` (any int key), the
same list under ``"ordered"`` (OrderedDict) or ``"counter"`` (Counter), ``{"list": [...]}``,
``{"tuple": [...]}`` and ``{"per_rank": {"0": node, ...}}``. Tensors are ``{"tensor": name}``, numpy
arrays ``{"ndarray": name}``. ``{"packed": [name, digest, kind, length]}`` is a container of many
plain values, whose bytes (``packing``) are stored as a tensor of that name. A tensor that is made
of others is ``{"subclass": {...}}`` (``subclass_node``), a container of these. All other nodes are
leaves of ``values``.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from dtckpt.errors import Corrupt

from .limits import shown
from .names import Path, index_component, join, key_component, rank_component
from .packing import as_bytes, unpack
from .standard_types import STANDARD_TAGS
from .subclass_node import SUBCLASS, inner_nodes, note_of
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
PACKED = "packed"
TAGS_OF_VERSION_3 = frozenset({PACKED, SUBCLASS, *STANDARD_TAGS})


@dataclass(slots=True)
class PerRank:
    """A value that every rank keeps for itself, such as the state of its random generator.

    Without it a plain tensor or value must be equal on all ranks. It is saved under the rank and
    given back to the same rank. A load on more ranks than were there at the save has nothing for
    those that are new: with ``new_rank="keep"`` they keep the value that they bring, which the
    report lists as ``kept``; with ``"error"`` it counts as missing.
    """

    value: Any
    new_rank: Literal["error", "keep"] = "error"

    def __post_init__(self) -> None:
        if self.new_rank not in ("error", "keep"):
            raise ValueError(f"new_rank={self.new_rank!r}: expected 'error' or 'keep'")


class Stateful(Protocol):
    """What an object needs to be saved and loaded by its state dict."""

    def state_dict(self) -> Any:
        """Return the state; its tensors are written as they are, views of live ones included."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state of the same structure."""
        ...


State = Mapping[Any, Any] | Stateful
GiveState = Callable[[], State]
"""Gives a state when all ranks take part in its save, so that all learn of its errors."""


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object (not a class) with both methods."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def item_of(container: Any, key: Any) -> Any:
    """Return an item of a container; None where it has none."""
    try:
        return container[key]
    except (LookupError, TypeError):
        return None


def dict_tag(value: object) -> str | None:
    """Return the tag of a dict or another mapping, and None for other values.

    Of subclasses and other mappings the items are kept, not the type.

    >>> from types import MappingProxyType
    >>> dict_tag(MappingProxyType({})), dict_tag(Counter()), dict_tag([])
    ('items', 'counter', None)
    """
    tag = DICTS.get(type(value))
    if tag is None and isinstance(value, Mapping):
        kinds = (kind for kind in (OrderedDict, Counter) if isinstance(value, kind))
        return DICTS[next(kinds, dict)]
    return tag


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
        if tag == SUBCLASS:
            return [(key, key_component(key), child) for key, child in inner_nodes(node).items()]
    except (AttributeError, TypeError, ValueError) as error:
        raise Corrupt(f"malformed {tag} node: {shown(error)}") from error
    if tag not in TENSORS and tag is not None and tag not in VALUE_TAGS and tag != PACKED:
        expected = (*CONTAINERS, SUBCLASS, *TENSORS, PACKED, *VALUE_TAGS)
        raise Corrupt(f"unknown tree node {shown(tag)}; expected one of {expected}")
    return []


def packed_name(node: Node) -> str:
    """Return the name under which the bytes of a packed node are stored; Corrupt if malformed."""
    told = node[PACKED]
    if type(told) is list:
        fields = cast(list[Any], told)
        if list(map(type, fields)) == [str, str, str, int]:
            return fields[0]
    raise Corrupt(f"malformed packed node: {shown(told)}")


def packed_nodes(node: Node) -> Iterator[Node]:
    """Yield the packed nodes of a tree."""
    return _packed_nodes(node) if PACKED in tags_in(node) else iter(())


def _packed_nodes(node: Node) -> Iterator[Node]:
    if tag_of(node) == PACKED:
        yield node
        return
    for _, _, child in children(node):
        yield from _packed_nodes(child)


def tags_in(tree: Node) -> set[str]:
    """Return the tags of all nodes of a tree; Corrupt where it is malformed.

    Asked of every manifest, most of which have neither packed values nor others of version 3, but
    ten thousands of nodes: so names of places are not made, and leaves are looked at together.
    """
    found: set[str] = set()
    level: list[Any] = [tree]
    try:
        while level:
            nodes: list[dict[str, Any]] = [node for node in level if type(node) is dict]
            found.update(*nodes)
            level = []
            for node in nodes:
                if len(node) == 1 and "tensor" in node:
                    continue
                for tag, inner in node.items():
                    if tag in ("dict", "per_rank"):
                        level += inner.values()
                    elif tag in PAIRS:
                        level += [child for _, child in inner]
                    elif tag in ("list", "tuple"):
                        level += inner
                    elif tag == SUBCLASS:
                        level += inner_nodes(node).values()
    except (AttributeError, TypeError, ValueError) as error:
        raise Corrupt(f"malformed tree: {shown(error)}") from error
    return found


def with_replaced(node: Node, replace: Callable[[Node], Node | None]) -> Node:
    """Return a tree in which nodes are what ``replace`` gives for them; None keeps a node."""
    made = replace(node)
    if made is not None:
        return made
    inner = children(node)
    if not inner:
        return node
    return with_children(node, [(key, with_replaced(child, replace)) for key, _, child in inner])


def _key(key: object) -> str | int:
    if type(key) is str or type(key) is int:
        return key
    raise TypeError(f"{shown(key)} is no key of a dict")


def same_values(one: Node, other: Node) -> bool:
    """Whether two nodes are alike, whatever tensors they name."""
    if tag_of(one) != tag_of(other):
        return False
    if tag_of(one) in TENSORS:
        return True
    if tag_of(one) == PACKED:  # the digest tells, whatever name the bytes have
        return one[PACKED][1:] == other[PACKED][1:]
    mine, others = children(one), children(other)
    if tag_of(one) == SUBCLASS and note_of(one).to_text() != note_of(other).to_text():
        return False
    if not mine or not others:
        return json.dumps(one) == json.dumps(other)  # tells 1 from True, which == does not
    return len(mine) == len(others) and all(
        key == other_key and same_values(node, other_node)
        for (key, _, node), (other_key, _, other_node) in zip(mine, others, strict=True)
    )


def container_node(tag: str | None, items: Sequence[tuple[str | int, Node]]) -> Node:
    """Return the container node of some (key or index, node) pairs; ``children`` undoes it."""
    if tag in PAIRS:
        return {tag: [[key, node] for key, node in items]}
    if tag in ("list", "tuple"):
        return {tag: [node for _, node in items]}
    return {tag: {str(key): node for key, node in items}}


def with_children(node: Node, items: Sequence[tuple[str | int, Node]]) -> Node:
    """Return a container node with other children under the same keys."""
    if tag_of(node) == SUBCLASS:
        return note_of(node).to_node({str(key): child for key, child in items})
    return container_node(tag_of(node), items)


def plain_node(value: Any, name: str, *, allow_pickle: bool = False) -> Node:
    """Return the node of a value without tensors, with a node for each value in it."""
    if type(value) in SEQUENCES:
        items = [
            plain_node(v, f"{name}/{i}", allow_pickle=allow_pickle) for i, v in enumerate(value)
        ]
        return {SEQUENCES[type(value)]: items}
    tag = DICTS.get(type(value))
    if tag is not None:
        nodes = [
            (key, plain_node(v, f"{name}/{key_component(key)}", allow_pickle=allow_pickle))
            for key, v in value.items()
        ]
        return container_node(tag_of_keys(tag, value), nodes)
    return encode_value(value, name, allow_pickle=allow_pickle)


def tag_of_keys(tag: str, value: Mapping[Any, Any]) -> str:
    """Return the tag of a dict: keys that are all str have a form of their own."""
    return "dict" if tag == "items" and all(type(key) is str for key in value) else tag


def per_rank_nodes(node: Node, path: Path = ()) -> Iterator[tuple[str, Node]]:
    """Yield (name, node) of every ``per_rank`` node."""
    if tag_of(node) == "per_rank":
        yield join(path), node
        return
    for _, component, child in children(node):
        yield from per_rank_nodes(child, (*path, component))


def tensor_names(node: Node) -> Iterator[str]:
    """Yield the names of what a tree has in data files; Corrupt where one is no name.

    These are its tensors, and the bytes of its packed nodes.
    """
    tag = tag_of(node)
    if tag in TENSORS:
        if not isinstance(node[tag], str):
            raise Corrupt(f"malformed {tag} node: {shown(node[tag])} is not a name")
        yield node[tag]
        return
    if tag == PACKED:
        yield packed_name(node)
        return
    for _, _, child in children(node):
        yield from tensor_names(child)


MakeSubclass = Callable[[Node, dict[str, Any], str], Any]
"""Makes a tensor subclass of its node and its inner tensors; given its name for messages."""


def unflatten(
    node: Node,
    tensor: Callable[[str, str], Any],
    *,
    allow_pickle: bool,
    path: Path = (),
    make: MakeSubclass | None = None,
) -> Any:
    """Return the value of a tree; ``tensor(name, tag)`` supplies its tensors.

    With the tag ``"packed"`` it supplies the bytes of a packed node, as bytes or a uint8 tensor.
    ``make`` makes tensor subclasses; without it a dict of their inner tensors stands for each.
    """
    tag = tag_of(node)
    if tag in TENSORS:
        return tensor(node[tag], cast(str, tag))
    if tag == PACKED:
        name = packed_name(node)
        return unpack(as_bytes(tensor(name, PACKED)), name)
    if tag not in CONTAINERS and tag != SUBCLASS:
        return decode_value(node, join(path), allow_pickle=allow_pickle)
    built = {
        key: unflatten(child, tensor, allow_pickle=allow_pickle, path=(*path, component), make=make)
        for key, component, child in children(node)
    }
    if tag == SUBCLASS and make is not None:
        return make(node, cast(dict[str, Any], built), join(path))
    if tag in ("list", "tuple"):
        return list(built.values()) if tag == "list" else tuple(built.values())
    return PAIRS[tag](built) if tag in PAIRS else built


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

    def expand(self, name: str, node: Node) -> None:
        """Put the nodes of a container in the place of a packed node; ``leaves`` stay.

        All ranks know the same leaves, and each expands what its own state needs.
        """
        added = TreeIndex()
        _add(added, name, node)
        self.nodes |= added.nodes

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
