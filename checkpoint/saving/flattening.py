"""A state dict taken apart into its structure, as a tree of JSON, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from dtckpt.errors import Unsavable

from ..optimizers.named_state import named_state
from ..optimizers.param_names import ParamNames
from ..optimizers.spread import state_dict_of, unknown_parts
from ..state.limits import MAX_NESTING
from ..state.names import Path, index_component, is_encodable, join, key_component, rank_component
from ..state.tree import DICTS, SEQUENCES, PerRank, container_node, dict_tag, is_stateful
from ..state.values import Node, encode_value
from ..tensors.local_tensor import tensor_tag
from ..tensors.visiting import Visited, visit


@dataclass(frozen=True, slots=True)
class Flattened:
    """A state dict taken apart."""

    tree: Node
    tensors: dict[str, Any]
    """Every tensor and numpy array by name, in order of appearance."""
    has_per_rank: bool
    """Whether something is kept for this rank alone."""
    groups: tuple[str, ...]
    """Lists of groups of optimizers whose parameters have names, which ranks bring together."""


def flatten(
    state: Any,
    *,
    rank: int,
    allow_pickle: bool,
    tell_alive: Callable[[], None] = lambda: None,
) -> Flattened:
    """Take a state dict, or an object that has one, apart into its structure and its tensors.

    Objects with ``state_dict()`` and ``load_state_dict()`` stand for their state dict; that of an
    optimizer goes by the names of its parameters. ``tell_alive`` is called after each object was
    asked. Raises Unsavable, with the name of the leaf, for what cannot be written.
    """
    if dict_tag(state) is None and not is_stateful(state):
        raise Unsavable(
            f"a state to save is a dict, or an object with state_dict() and load_state_dict(); got "
            f"{type(state).__name__}. Wrap other things in a dict"
        )
    visited = visit(state, rank, ask=state_dict_of, tell_alive=tell_alive)
    names = ParamNames(state, visited, rank)
    return _Flattening(visited, names, rank, allow_pickle).run(state)


def _check_depth(path: Path) -> None:
    """Raise Unsavable for a container that lies too deep."""
    if len(path) >= MAX_NESTING:
        raise Unsavable(f"{join(path)}: lies in more than {MAX_NESTING} containers")


@dataclass(slots=True)
class _Flattening:
    visited: Visited
    names: ParamNames
    rank: int
    allow_pickle: bool
    tensors: dict[str, Any] = field(default_factory=dict[str, Any])
    has_per_rank: bool = False
    groups: list[str] = field(default_factory=list[str])

    def run(self, state: Any) -> Flattened:
        return Flattened(self.node(state, ()), self.tensors, self.has_per_rank, tuple(self.groups))

    def node(self, value: Any, path: Path) -> Node:
        if type(value) in DICTS:  # nothing else, and there may be very many
            return self.dict_node(value, path)
        tag = tensor_tag(value)
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
            self.has_per_rank = True
            child = self.node(value.value, (*path, rank_component(self.rank)))
            return {"per_rank": {str(self.rank): child}}
        if is_stateful(value):
            return self.stateful(value, path)
        if dict_tag(value) is not None:
            return self.dict_node(value, path)
        if type(value) in SEQUENCES:
            _check_depth(path)
            items = [self.node(v, (*path, index_component(i))) for i, v in enumerate(value)]
            return {SEQUENCES[type(value)]: items}
        return encode_value(value, join(path), allow_pickle=self.allow_pickle)

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
        return self.node(state, path)

    def dict_node(self, value: Mapping[Any, Any], path: Path) -> Node:
        _check_depth(path)
        for key in value:
            if type(key) not in (str, int):
                raise Unsavable(
                    f"{join(path)}: the dict key {key!r} is of type {type(key).__name__}; "
                    "only str and int keys can be written"
                )
        nodes = [(key, self.node(v, (*path, key_component(key)))) for key, v in value.items()]
        tag = cast(str, dict_tag(value))
        if tag == "items" and all(type(key) is str for key in value):
            tag = "dict"
        return container_node(tag, nodes)
