"""Matching a state dict that is to be filled with the tree of a checkpoint.

The template is walked beside the tree. Tensors become destinations, other leaves take the saved
value. Nothing is changed while matching: the result is a function that rebuilds the state once
every byte has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from dtckpt.errors import LayoutMismatch

from .names import Path, index_component, join, key_component, rank_component
from .optimizers import load_optimizer, optimizer_template
from .plan import StoredTensor
from .ranks import Ranks
from .stateful import Stateful, is_stateful
from .tree import (
    CONTAINERS,
    DICT_TAGS,
    DICTS,
    SEQUENCES,
    TENSORS,
    Node,
    PerRank,
    children,
    leaves,
    per_rank_nodes,
    tag_of,
    unflatten,
)

Rebuild = Callable[[], Any]


@dataclass(slots=True)
class Match:
    """What of a template the checkpoint has, and what not."""

    destinations: dict[str, Any] = field(default_factory=dict[str, Any])
    """Tensors and arrays to be filled, by the name of the stored tensor."""
    values: list[str] = field(default_factory=list[str])
    """Other leaves that take a saved value."""
    missing: list[str] = field(default_factory=list[str])
    """Leaves of the template that the checkpoint does not have."""
    unexpected: list[str] = field(default_factory=list[str])
    """Leaves of the checkpoint that the template does not have."""
    dropped: list[str] = field(default_factory=list[str])
    """Values that ranks kept for themselves which take no part now."""
    problems: list[str] = field(default_factory=list[str])
    """Leaves that are there on both sides but cannot be the same thing."""
    finishers: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """Calls of ``load_state_dict``, to be made last."""


def match(
    template: Mapping[Any, Any],
    tree: Node,
    stored: Mapping[str, StoredTensor],
    *,
    ranks: Ranks,
    tensor_tag: Callable[[object], str | None],
    allow_pickle: bool,
) -> tuple[Match, Rebuild]:
    """Walk ``template`` beside ``tree`` and return the match and the function that finishes it."""
    if type(template) not in DICTS:
        raise LayoutMismatch(
            f"a state to load into is a dict, got {type(template).__name__}; load changes it in "
            "place, so wrap other things in a dict"
        )
    walk = _Walk(stored, ranks, tensor_tag, allow_pickle)
    rebuild = walk.node(template, tree, ())
    return walk.found, rebuild


class _Walk:
    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        ranks: Ranks,
        tensor_tag: Callable[[object], str | None],
        allow_pickle: bool,
    ) -> None:
        self.stored = stored
        self.ranks = ranks
        self.tensor_tag = tensor_tag
        self.allow_pickle = allow_pickle
        self.found = Match()

    def node(self, value: Any, node: Node, path: Path) -> Rebuild:
        if self.tensor_tag(value) is not None:
            return self.tensor(value, node, path)
        if isinstance(value, PerRank):
            return self.per_rank(value, node, path)
        if is_stateful(value):
            return self.stateful(value, node, path)
        if type(value) in DICTS and value:
            return self.dict(value, node, path)
        if type(value) in SEQUENCES and value:
            return self.sequence(value, node, path)
        return self.leaf(value, node, path)

    def tensor(self, value: Any, node: Node, path: Path) -> Rebuild:
        tag = tag_of(node)
        if tag not in TENSORS:
            self.found.problems.append(f"{join(path)}: a tensor is wanted, a value was saved")
        elif node[tag] in self.found.destinations:
            self.found.problems.append(f"{join(path)}: stored tensor {node[tag]!r} wanted twice")
        else:
            self.found.destinations[node[tag]] = value
        return lambda: value

    def per_rank(self, value: PerRank, node: Node, path: Path) -> Rebuild:
        inner = {key: child for key, _, child in children(node)}
        if tag_of(node) != "per_rank":
            self.found.problems.append(f"{join(path)}: PerRank is wanted, a shared value was saved")
            return lambda: value
        for rank in inner.keys() - set(self.ranks.all):
            names = leaves(inner[rank], (*path, rank_component(int(rank))))
            self.found.dropped += [name for name, _ in names]
        component = (*path, rank_component(self.ranks.rank))
        if self.ranks.rank not in inner:
            self.found.missing.append(join(component))
            return lambda: value
        rebuild = self.node(value.value, inner[self.ranks.rank], component)
        return lambda: PerRank(rebuild())

    def stateful(self, value: Any, node: Node, path: Path) -> Rebuild:
        if isinstance(value, torch.optim.Optimizer):
            optimizer: torch.optim.Optimizer = value
            rebuild = self.node(optimizer_template(optimizer, node, self.stored), node, path)
            self.found.finishers.append(lambda: load_optimizer(optimizer, rebuild()))
        else:
            rebuild = self.node(value.state_dict(), node, path)
            self.found.finishers.append(lambda: value.load_state_dict(rebuild()))
        return lambda: value

    def dict(self, value: dict[Any, Any], node: Node, path: Path) -> Rebuild:
        if tag_of(node) not in DICT_TAGS:
            return self.mismatch(value, node, path, "a dict")
        saved = {key: child for key, _, child in children(node)}
        rebuilds: dict[Any, Rebuild] = {}
        for key, item in value.items():
            if key in saved:
                rebuilds[key] = self.node(item, saved[key], (*path, key_component(key)))
            else:
                self.miss(item, (*path, key_component(key)))
        for key, child in saved.items():
            if key not in value:
                self.unexpected(child, (*path, key_component(key)))

        def rebuild() -> Any:
            for key, item in rebuilds.items():
                value[key] = item()
            return value

        return rebuild

    def sequence(self, value: list[Any] | tuple[Any, ...], node: Node, path: Path) -> Rebuild:
        if tag_of(node) not in ("list", "tuple"):
            return self.mismatch(value, node, path, f"a {type(value).__name__}")
        saved = [child for _, _, child in children(node)]
        paths = [(*path, index_component(i)) for i in range(max(len(saved), len(value)))]
        both = list(zip(value, saved, paths, strict=False))
        rebuilds = [self.node(item, child, p) for item, child, p in both]
        for item, p in zip(value[len(saved) :], paths[len(saved) :], strict=False):
            self.miss(item, p)
        for child, p in zip(saved[len(value) :], paths[len(value) :], strict=False):
            self.unexpected(child, p)

        def rebuild() -> Any:
            items = [item() for item in rebuilds] + list(value[len(rebuilds) :])
            if isinstance(value, list):
                value[:] = items
                return value
            return tuple(items)

        return rebuild

    def leaf(self, value: Any, node: Node, path: Path) -> Rebuild:
        """A leaf of the template takes whatever value was saved there, containers included."""
        if any(True for _ in per_rank_nodes(node)):
            self.found.problems.append(
                f"{join(path)}: every rank kept a value of its own; wrap the destination in PerRank"
            )
            return lambda: value
        tensors = [name for name, child in leaves(node, path) if tag_of(child) in TENSORS]
        if tensors:
            if (type(value) in DICTS or type(value) in SEQUENCES) and tag_of(node) in CONTAINERS:
                self.unexpected(node, path)
            else:
                self.found.problems.append(
                    f"{join(path)}: {type(value).__name__} is wanted, but tensors were saved "
                    f"({', '.join(tensors[:3])}); give tensors to load into"
                )
            return lambda: value
        self.found.values.append(join(path))

        def no_tensor(name: str, _tag: str) -> Any:
            raise LayoutMismatch(f"unexpected tensor {name!r}")

        loaded = unflatten(node, no_tensor, allow_pickle=self.allow_pickle, path=path)
        return lambda: loaded

    def mismatch(self, value: Any, node: Node, path: Path, wanted: str) -> Rebuild:
        self.found.problems.append(
            f"{join(path)}: {wanted} is wanted, but {tag_of(node) or 'a value'} was saved"
        )
        return lambda: value

    def miss(self, value: Any, path: Path) -> None:
        """Note every leaf of a template for which nothing was saved."""
        if type(value) in DICTS and value:
            for key, item in value.items():
                self.miss(item, (*path, key_component(key)))
        elif type(value) in SEQUENCES and value:
            for i, item in enumerate(value):
                self.miss(item, (*path, index_component(i)))
        elif is_stateful(value):
            self.miss(cast(Stateful, value).state_dict(), path)
        else:
            self.found.missing.append(join(path))

    def unexpected(self, node: Node, path: Path) -> None:
        self.found.unexpected += [name for name, _ in leaves(node, path)]
