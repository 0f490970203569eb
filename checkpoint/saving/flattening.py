"""A state dict taken apart into its structure, as a tree of JSON, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
import xxhash

from dtckpt.errors import PlacementError, Unsavable

from ..optimizers.named_state import named_state, put_entry
from ..optimizers.own_entries import STATE, OwnEntry
from ..optimizers.param_names import ParamLabel, ParamNames, params_of
from ..optimizers.spread import state_dict_of, unknown_parts
from ..state.coordinates import MESH, VALUES, PerCoordinate
from ..state.limits import MAX_NESTING
from ..state.names import (
    Path,
    index_component,
    is_encodable,
    join,
    key_component,
    key_of,
    rank_component,
)
from ..state.packing import MIN_PACKED, pack, unpack
from ..state.subclass_node import SUBCLASS, note_of
from ..state.tree import (
    DICTS,
    PACKED,
    SEQUENCES,
    TENSORS,
    PerRank,
    children,
    container_node,
    dict_tag,
    is_stateful,
    packed_name,
    plain_node,
    tag_of,
    tag_of_keys,
    with_replaced,
)
from ..state.values import Node, encode_value
from ..tensors.dtensors import is_dtensor
from ..tensors.local_tensor import local_tensor, tensor_tag
from ..tensors.spec import fingerprint
from ..tensors.subclasses import has_subclass_shard, is_subclass, take_apart
from ..tensors.visiting import Visited, visit

_MOST_NODES = MIN_PACKED
"""A dict of few keys stays a node, by whose keys parts are selected, unless more lies below it."""


@dataclass(frozen=True, slots=True)
class Flattened:
    """A state dict taken apart."""

    tree: Node
    tensors: dict[str, Any]
    """Every tensor and numpy array by name, and the bytes of packed values, in order of
    appearance."""
    has_per_rank: bool
    """Whether something is kept for this rank alone, or for its coordinate on a mesh."""
    copies: dict[str, tuple[int, str]]
    """Of every value of a coordinate the rank that keeps it and a hash of what is here, by name."""
    groups: tuple[str, ...]
    """Lists of groups of optimizers whose parameters have names, which ranks bring together."""
    entries: Mapping[str, tuple[Any, Mapping[Any, Any] | None]]
    """Distributed parameters of optimizers with their state, if they have any, by its name."""
    objects: tuple[Any, ...]
    """Those that stand for their state dicts."""


def flatten(
    state: Any,
    *,
    rank: int,
    everyone: Sequence[int],
    allow_pickle: bool,
    tell_alive: Callable[[], None] = lambda: None,
    own_entries: Collection[str] = (),
) -> Flattened:
    """Take a state dict, or an object that has one, apart into its structure and its tensors.

    Objects with ``state_dict()`` and ``load_state_dict()`` stand for their state dict; that of an
    optimizer goes by the names of its parameters. ``everyone`` are the ranks that take part.
    ``tell_alive`` is called after each object was asked. ``own_entries`` are names of state of
    distributed parameters that is stored apart for each of their parts. Raises Unsavable, with the
    name of the leaf, for what cannot be written.
    """
    if dict_tag(state) is None and not is_stateful(state):
        raise Unsavable(
            f"a state to save is a dict, or an object with state_dict() and load_state_dict(); got "
            f"{type(state).__name__}. Wrap other things in a dict"
        )
    visited = visit(state, rank, ask=state_dict_of, tell_alive=tell_alive)
    names = ParamNames(state, visited, rank)
    flattening = _Flattening(visited, names, rank, tuple(everyone), allow_pickle, own_entries)
    return flattening.run(state)


def with_plain_nodes(tree: Node, names: Sequence[str], tensors: Mapping[str, Any]) -> Node:
    """Return a tree in which the packed values of some names are nodes for each value."""

    def plain(node: Node) -> Node | None:
        if tag_of(node) != PACKED or packed_name(node) not in names:
            return None
        name = packed_name(node)
        return plain_node(unpack(memoryview(tensors[name].numpy()), name), name)

    return with_replaced(tree, plain)


def _is_leaf(value: object) -> bool:
    """Whether a value of no class of Python's own is no container, no tensor and no object."""
    return not (
        tensor_tag(value) is not None
        or isinstance(value, PerRank | PerCoordinate)
        or is_stateful(value)
        or dict_tag(value) is not None
    )


def _hash_of(node: Node, tensors: Mapping[str, Any]) -> str:
    """Return what tells values of ranks apart, whatever numbers these have."""

    def told(node: Node) -> Node:
        tag = tag_of(node)
        if tag in TENSORS:
            local = local_tensor(node[tag], tensors[node[tag]])
            parts = [[str(box), digest] for box, digest in local.digests()]
            return [tag, local.dtype.code, list(local.shape), parts]
        if tag == PACKED:
            return [tag, *node[tag][1:]]
        inner = children(node)
        note = note_of(node).to_text() if tag == SUBCLASS else ""
        return [tag, note, [[key, told(child)] for key, _, child in inner]] if inner else node

    return fingerprint(json.dumps(told(node)).encode()).hex()


def _check_depth(path: Path) -> None:
    """Raise Unsavable for a container that lies too deep."""
    if len(path) >= MAX_NESTING:
        raise Unsavable(f"{join(path)}: lies in more than {MAX_NESTING} containers")


@dataclass(slots=True)
class _Flattening:
    visited: Visited
    names: ParamNames
    rank: int
    everyone: tuple[int, ...]
    allow_pickle: bool
    own_entries: Collection[str]
    tensors: dict[str, Any] = field(default_factory=dict[str, Any])
    has_per_rank: bool = False
    copies: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    groups: list[str] = field(default_factory=list[str])
    entries: dict[str, tuple[Any, Mapping[Any, Any] | None]] = field(
        default_factory=dict[str, tuple[Any, "Mapping[Any, Any] | None"]]
    )
    keeps_nodes: bool = False
    """Whether nothing is packed here: what reads optimizers and meshes looks into the tree."""
    num_leaves: int = 0
    """Values that have become nodes of their own."""

    def run(self, state: Any) -> Flattened:
        node, objects = self.node(state, ()), tuple(self.visited.objects.values())
        groups = tuple(self.groups)
        return Flattened(
            node, self.tensors, self.has_per_rank, self.copies, groups, self.entries, objects
        )

    def node(self, value: Any, path: Path) -> Node:
        if type(value) in DICTS:  # nothing else, and there may be very many
            return self.dict_node(value, path)
        tag = tensor_tag(value)
        if tag is not None:
            if is_subclass(value):
                return self.subclass(value, path)
            name = join(path)
            if not is_encodable(name):
                raise Unsavable(
                    f"{name!a}: no data file can hold a tensor of this name, since it has half of "
                    "a surrogate pair in it, which UTF-8 has no bytes for; rename the key"
                )
            self.tensors[name] = value
            return {tag: name}
        if isinstance(value, PerRank):
            self.has_per_rank = True
            child = self.node(value.value, (*path, rank_component(self.rank)))
            return {"per_rank": {str(self.rank): child}}
        if isinstance(value, PerCoordinate):
            return self.per_coordinate(value, path)
        if isinstance(value, OwnEntry):
            return self.own_entry(value, path)
        if is_stateful(value):
            return self.stateful(value, path)
        if dict_tag(value) is not None:
            return self.dict_node(value, path)
        if type(value) in SEQUENCES:
            _check_depth(path)
            packed = self.packed(value, path)
            if packed is not None:
                return packed
            items = [self.node(v, (*path, index_component(i))) for i, v in enumerate(value)]
            return {SEQUENCES[type(value)]: items}
        self.num_leaves += 1
        return encode_value(value, join(path), allow_pickle=self.allow_pickle)

    def subclass(self, value: Any, path: Path) -> Node:
        """Return the node of a tensor that has no memory of its own, but consists of others."""
        _check_depth(path)
        parts = take_apart(join(path), value, allow_pickle=self.allow_pickle)
        return parts.note.to_node(
            {key: self.node(t, (*path, key_component(key))) for key, t in parts.tensors.items()}
        )

    def packed(self, value: Any, path: Path) -> Node | None:
        """Return the node of a container of many plain values; None for any other.

        Its bytes are written as a tensor. The digest in the node is that of all of them: ranks
        compare values whole, and tensors by samples.
        """
        name = join(path)
        if self.keeps_nodes or not path or not is_encodable(name):
            return None
        data = pack(value, may_hold=_is_leaf, depth=len(path))
        if data is None:
            return None
        self.tensors[name] = torch.frombuffer(data, dtype=torch.uint8)
        kind = SEQUENCES.get(type(value)) or DICTS[type(value)]
        return {PACKED: [name, xxhash.xxh3_128_hexdigest(data), kind, len(value)]}

    def per_coordinate(self, value: PerCoordinate, path: Path) -> Node:
        """Return the node of a value that the first rank at each coordinate keeps for all."""
        self.has_per_rank = True
        try:
            places, own = value.place(self.rank, self.everyone)
        except PlacementError as error:
            raise Unsavable(f"{join(path)}: {error}") from error
        values = self.kept_by(places.rank(own), value.value, (*path, key_component(VALUES)))
        outside, self.keeps_nodes = self.keeps_nodes, True
        mesh = self.node(places.to_json(), (*path, key_component(MESH)))
        self.keeps_nodes = outside
        return {"dict": {MESH: mesh, VALUES: values}}

    def kept_by(self, owner: int, value: Any, path: Path) -> Node:
        """Return the node of a value that one rank keeps for others, too, who have the same."""
        before, self.tensors = self.tensors, {}
        child = self.node(value, (*path, rank_component(self.rank)))
        here, self.tensors = self.tensors, before
        self.copies[join(path)] = owner, _hash_of(child, here)
        if owner == self.rank:
            self.tensors |= here
        return {"per_rank": {str(self.rank): child} if owner == self.rank else {}}

    def own_entry(self, value: OwnEntry, path: Path) -> Node:
        """Return the node of state that is stored apart for each part of its parameter."""
        self.has_per_rank = True
        return self.kept_by(value.owner(self.rank), value.to_state(), path)

    def stateful(self, value: Any, path: Path) -> Node:
        state = self.visited.states[join(path)]
        if isinstance(value, torch.optim.Optimizer):
            problem = unknown_parts(value, self.visited.modules)
            if problem:
                raise Unsavable(f"{join(path)}: {problem}")
            labels = self.names.labels(value)
            named = named_state(state, labels)
            if named is not None and any(label.text is not None for label in labels):
                self.groups.append(join((*path, "param_groups")))
                state = named
                self.note_entries(value, labels, named["state"], (*path, STATE))
        outside = self.keeps_nodes
        self.keeps_nodes = outside or isinstance(value, torch.optim.Optimizer)
        node = self.node(state, path)
        self.keeps_nodes = outside
        return node

    def note_entries(
        self,
        optimizer: torch.optim.Optimizer,
        labels: Sequence[ParamLabel],
        entries: dict[Any, Any],
        path: Path,
    ) -> None:
        """Note the state of distributed parameters, and have some of it stored by its parts."""
        for label, param in zip(labels, params_of(optimizer), strict=True):
            if label.text is None or not is_dtensor(param):
                continue
            keys = [key_of(component) for component in label.text.split("/")]
            held = entries
            for key in keys[:-1]:
                held = held.get(key, {})
            entry = held.get(keys[-1])
            name = f"{join(path)}/{label.text}"
            self.entries[name] = param, entry
            # Shards of a subclass have no boxes of their own in a tensor that others can cut anew.
            if name in self.own_entries or any(map(has_subclass_shard, (entry or {}).values())):
                put_entry(entries, keys, OwnEntry(param, entry or {}))

    def dict_node(self, value: Mapping[Any, Any], path: Path) -> Node:
        _check_depth(path)
        for key in () if set(map(type, value)) <= {str, int} else value:
            if type(key) not in (str, int):
                raise Unsavable(
                    f"{join(path)}: the dict key {key!r} is of type {type(key).__name__}; "
                    "only str and int keys can be written"
                )
        may_pack = type(value) in DICTS and "param_groups" not in value
        if may_pack and len(value) >= MIN_PACKED:
            packed = self.packed(value, path)
            if packed is not None:
                return packed
        num_leaves, num_tensors = self.num_leaves, len(self.tensors)
        outside, self.keeps_nodes = self.keeps_nodes, self.keeps_nodes or "param_groups" in value
        nodes = [(key, self.node(v, (*path, key_component(key)))) for key, v in value.items()]
        self.keeps_nodes = outside
        if may_pack and self.num_leaves - num_leaves >= _MOST_NODES:
            # Many short lists, or many small dicts: nothing in them was packed by itself.
            packed = self.packed(value, path)
            if packed is not None:
                # What was packed of its parts is in it.
                own = packed_name(packed)
                for name in [*islice(self.tensors, num_tensors, None)]:
                    if name != own:
                        del self.tensors[name]
                self.num_leaves = num_leaves
                return packed
        return container_node(tag_of_keys(cast(str, dict_tag(value)), value), nodes)
