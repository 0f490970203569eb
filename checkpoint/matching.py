"""Matching a state dict that is to be filled with the tree of a checkpoint.

The template is walked; every name in it is looked up in the tree. Tensors become destinations,
other leaves take the saved value. Nothing is changed while matching: the result is a function that
rebuilds the state once every byte has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from dtckpt.errors import LayoutMismatch

from .materialising import Replaced, adopt, foreign_tensors, has_meta_tensors
from .names import index_component, key_component, rank_component
from .optimizers import FreshState, load_optimizer, optimizer_template
from .plan import StoredTensor
from .ranks import Ranks
from .renaming import Renaming
from .selecting import Selection
from .stateful import is_stateful
from .tree import (
    CONTAINERS,
    DICT_TAGS,
    DICTS,
    SEQUENCES,
    TENSORS,
    Node,
    PerRank,
    children,
    tag_of,
    unflatten,
)
from .tree_index import ABSENT, TreeIndex, below, index_tree

Rebuild = Callable[[], Any]
"""Returns what a value of the template has become; None in its place says that it stays."""
Finisher = Callable[[Replaced], object]


@dataclass(slots=True)
class Match:
    """What of a template the checkpoint has, and what not; by names in the checkpoint."""

    destinations: dict[str, Any] = field(default_factory=dict[str, Any])
    """Tensors and arrays to be filled, by the name of the stored tensor. What stands here when the
    state is rebuilt takes the place of tensors without memory."""
    own: set[str] = field(default_factory=set[str])
    """Destinations that this rank keeps for itself."""
    values: list[str] = field(default_factory=list[str])
    """Other leaves that take a saved value."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Leaves of the template that the checkpoint does not have, with their name in the state."""
    unexpected: list[str] = field(default_factory=list[str])
    """Leaves of the checkpoint that the template does not have."""
    dropped: list[str] = field(default_factory=list[str])
    """Values that ranks kept for themselves which take no part now."""
    problems: list[str] = field(default_factory=list[str])
    """Leaves that are there on both sides but cannot be the same thing."""
    finishers: list[Finisher] = field(default_factory=list[Finisher])
    """Calls of ``load_state_dict``, to be made last. They are given what took the place of tensors
    without memory, and add to it."""
    leaves: list[str] = field(default_factory=list[str])
    """All leaves of the checkpoint, in the order that all ranks know."""

    def unexpected_mask(self) -> str:
        """Return a hex number whose bit i says that leaf i is unexpected: short, for many ranks."""
        unexpected = set(self.unexpected)
        bits = "".join("1" if leaf in unexpected else "0" for leaf in reversed(self.leaves))
        return f"{int(bits or '0', 2):x}"

    def names_of_mask(self, mask: str) -> list[str]:
        """Return the leaves of a mask."""
        bits = reversed(f"{int(mask, 16):b}")
        return [leaf for leaf, bit in zip(self.leaves, bits, strict=False) if bit == "1"]


def match(
    template: Mapping[Any, Any],
    tree: Node,
    stored: Mapping[str, StoredTensor],
    *,
    ranks: Ranks,
    tensor_tag: Callable[[object], str | None],
    allow_pickle: bool,
    where: str,
    selection: Selection | None = None,
    renaming: Renaming | None = None,
) -> tuple[Match, Rebuild]:
    """Walk ``template`` beside ``tree`` and return the match and the function that finishes it."""
    if type(template) not in DICTS:
        raise LayoutMismatch(
            f"a state to load into is a dict, got {type(template).__name__}; load changes it in "
            "place, so wrap other things in a dict"
        )
    index = index_tree(tree)
    if selection is not None:
        selection.check(index.leaves, where)
    walk = _Walk(index, stored, ranks, tensor_tag, allow_pickle, selection, renaming)
    rebuild = walk.node(template, "")
    return walk.finish(), rebuild or (lambda: template)


class _Walk:
    def __init__(
        self,
        index: TreeIndex,
        stored: Mapping[str, StoredTensor],
        ranks: Ranks,
        tensor_tag: Callable[[object], str | None],
        allow_pickle: bool,
        selection: Selection | None,
        renaming: Renaming | None,
    ) -> None:
        self.index = index
        self.stored = stored
        self.ranks = ranks
        self.tensor_tag = tensor_tag
        self.allow_pickle = allow_pickle
        self.selection = selection
        self.renaming = renaming
        self.found = Match(leaves=index.leaves)
        self.taken: set[str] = set()
        """Leaves of the checkpoint that the state has a place for."""
        self.within_per_rank = False

    def at(self, name: str) -> str:
        """Return the name in the checkpoint of a name in the state."""
        return name if self.renaming is None else self.renaming(name)

    def is_selected(self, at: str) -> bool:
        return self.selection is None or at in self.selection

    def cannot_reach(self, name: str) -> bool:
        """Whether it is plain that nothing at or below a name in the state is selected."""
        if self.selection is None or self.renaming is not None:
            return False
        return not self.selection.may_reach(name)

    def selects_below(self, at: str) -> bool:
        """Whether some leaf at or below a node that is there is selected."""
        return self.selection is None or any(map(self.is_selected, self.index.leaves_of(at)))

    def finish(self) -> Match:
        self.found.unexpected = [
            name for name in self.index.leaves if name not in self.taken and self.is_selected(name)
        ]
        return self.found

    def node(self, value: Any, name: str) -> Rebuild | None:
        if self.tensor_tag(value) is not None:
            return self.tensor(value, name)
        if self.cannot_reach(name):
            return None  # and ask nobody for a state dict in vain
        if isinstance(value, PerRank):
            return self.per_rank(value, name)
        if is_stateful(value):
            return self.stateful(value, name)
        if type(value) in DICTS and value:
            return self.dict(value, name)
        if type(value) in SEQUENCES and value:
            return self.sequence(value, name)
        return self.leaf(value, name)

    def tensor(self, value: Any, name: str) -> Rebuild | None:
        at = self.at(name)
        if not self.is_selected(at):
            return None
        node = self.index.find(at)
        if node is ABSENT:
            self.found.missing[at] = name
            return None
        tag = tag_of(node)
        if tag not in TENSORS:
            self.found.problems.append(f"{at}: a tensor is wanted, a value was saved")
            return None
        if not self.take(at, name):
            return None
        stored: str = node[tag]
        destinations = self.found.destinations
        destinations[stored] = value
        if self.within_per_rank:
            self.found.own.add(stored)
        return (lambda: destinations[stored]) if getattr(value, "is_meta", False) else None

    def take(self, at: str, name: str) -> bool:
        """Note that a leaf of the checkpoint has a place; not so if it has one already."""
        if at in self.taken:
            self.found.problems.append(f"{at}: wanted twice, the second time as {name}")
            return False
        self.taken.add(at)
        return True

    def per_rank(self, value: PerRank, name: str) -> Rebuild | None:
        at, own = self.at(name), rank_component(self.ranks.rank)
        node = self.index.find(at)
        if node is ABSENT:
            if self.is_selected(below(at, own)):
                self.found.missing[below(at, own)] = below(name, own)
            return None
        if tag_of(node) != "per_rank":
            if self.selects_below(at):
                self.found.problems.append(f"{at}: PerRank is wanted, a shared value was saved")
            return None
        for rank, component, _ in children(node):
            if rank == self.ranks.rank:
                continue
            names = [n for n in self.index.leaves_of(below(at, component)) if self.is_selected(n)]
            self.taken.update(names)
            if rank not in self.ranks.all:
                self.found.dropped += names
        self.within_per_rank = True
        rebuild = self.node(value.value, below(name, own))
        self.within_per_rank = False
        return rebuild and (lambda: PerRank(rebuild()))

    def stateful(self, value: Any, name: str) -> Rebuild | None:
        found = self.found
        before = len(found.destinations), len(found.values)
        fresh: FreshState | None = None
        if isinstance(value, torch.optim.Optimizer):
            fresh = FreshState(self.index, self.stored, self.is_selected)
            state: Any = optimizer_template(value, lambda p: self.at(below(name, p)), fresh)
            found.problems += fresh.problems
        else:
            state = value.state_dict()
        rebuild = self.node(state, name) or (lambda: state)
        if (len(found.destinations), len(found.values)) == before:
            return None  # nothing to hand over, and nothing may change
        if fresh is not None:
            found.problems += fresh.unfilled(found.destinations.values())
            found.finishers.append(lambda replaced: load_optimizer(value, rebuild(), replaced))
        elif isinstance(value, torch.nn.Module) and has_meta_tensors(value):
            new = dict(islice(found.destinations.items(), before[0], None))
            found.problems += foreign_tensors(value, new)
            found.finishers.insert(0, lambda replaced: adopt(value, rebuild(), replaced))
        else:
            load_state_dict: Callable[[Any], object] = value.load_state_dict
            found.finishers.append(lambda _: load_state_dict(rebuild()))
        return None

    def dict(self, value: dict[Any, Any], name: str) -> Rebuild | None:
        if not self.is_kind(DICT_TAGS, value, name):
            return None
        rebuilds: dict[Any, Rebuild] = {}
        for key, item in value.items():
            rebuild = self.node(item, below(name, key_component(key)))
            if rebuild is not None:
                rebuilds[key] = rebuild
        if not rebuilds:
            return None

        def rebuild_dict() -> Any:
            for key, item in rebuilds.items():
                value[key] = item()
            return value

        return rebuild_dict

    def sequence(self, value: list[Any] | tuple[Any, ...], name: str) -> Rebuild | None:
        if not self.is_kind(("list", "tuple"), value, name):
            return None
        rebuilds = [self.node(v, below(name, index_component(i))) for i, v in enumerate(value)]
        if not any(rebuilds):
            return None

        def rebuild_sequence() -> Any:
            items = [
                old if new is None else new() for old, new in zip(value, rebuilds, strict=True)
            ]
            if isinstance(value, list):
                value[:] = items
                return value
            return tuple(items)

        return rebuild_sequence

    def is_kind(self, tags: tuple[str, ...], value: Any, name: str) -> bool:
        """Whether a container can be walked: the same kind was saved at its name, or nothing."""
        at = self.at(name)
        node = self.index.find(at)
        if node is ABSENT:  # its items are missing, unless they have other names
            return True
        tag = tag_of(node)
        if tag not in tags:
            if self.selects_below(at):
                wanted = "a dict" if tags is DICT_TAGS else f"a {type(value).__name__}"
                self.found.problems.append(
                    f"{at}: {wanted} is wanted, but {tag or 'a value'} was saved"
                )
            return False
        self.taken.add(at)  # an empty one is a leaf
        return True

    def leaf(self, value: Any, name: str) -> Rebuild | None:
        """A leaf of the template takes whatever value was saved there, containers included."""
        at = self.at(name)
        node = self.index.find(at)
        if node is ABSENT:
            if self.is_selected(at):
                self.found.missing[at] = name
            return None
        names = list(self.index.leaves_of(at)) if tag_of(node) in CONTAINERS else [at]
        selected = [leaf for leaf in names if self.is_selected(leaf)]
        if not selected:
            return None
        tensors = [leaf for leaf in names if tag_of(self.index.nodes[leaf]) in TENSORS]
        is_container = type(value) in DICTS or type(value) in SEQUENCES
        problem = ""
        if any(part.startswith("@") for leaf in names for part in leaf[len(at) :].split("/")):
            problem = "every rank kept a value of its own; wrap the destination in PerRank"
        elif tensors and is_container and tag_of(node) in CONTAINERS:
            return None  # an empty container has no place for them
        elif tensors:
            problem = (
                f"{type(value).__name__} is wanted, but tensors were saved "
                f"({', '.join(tensors[:3])}); give tensors to load into"
            )
        elif len(selected) < len(names):
            problem = f"only a part of it is selected, but {type(value).__name__} has no parts"
        if problem:
            self.found.problems.append(f"{at}: {problem}")
            return None
        if not all(self.take(leaf, name) for leaf in names):
            return None
        self.found.values.append(at)

        def no_tensor(name: str, _tag: str) -> Any:
            raise LayoutMismatch(f"unexpected tensor {name!r}")

        loaded = unflatten(node, no_tensor, allow_pickle=self.allow_pickle, path=(at,))
        return lambda: loaded
