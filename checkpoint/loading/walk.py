"""The walk of a state dict that is to be filled beside the tree of a checkpoint.

Every name in the state is looked up in the tree. Tensors become destinations, other leaves take the
saved value. Nothing is changed: every step returns what rebuilds its part once all bytes are there.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from dtckpt.errors import LayoutMismatch

from ..optimizers.named_state import optimizers_in, wrong_numbers
from ..optimizers.pairing import Tables
from ..optimizers.param_names import ParamNames, plain_name
from ..optimizers.spread import state_dict_of
from ..optimizers.unwrapping import wrapped_again
from ..state.coordinates import PerCoordinate
from ..state.names import index_component, key_component, rank_component
from ..state.subclass_node import SUBCLASS
from ..state.tree import (
    ABSENT,
    CONTAINERS,
    DICT_TAGS,
    DICTS,
    SEQUENCES,
    TENSORS,
    PerRank,
    below,
    children,
    dict_tag,
    is_stateful,
    same_values,
    tag_of,
)
from ..tensors.announced import PLAIN_TENSORS
from ..tensors.local_tensor import tensor_tag
from ..tensors.materialising import adopt, foreign_tensors, has_meta_tensors, is_meta
from ..tensors.new_subclasses import NewSubclass
from ..tensors.subclasses import described, is_subclass
from ..tensors.visiting import comes_last, is_whole, visit
from .match import Finisher, Match, Rebuild
from .object_state import SavedForms
from .packed_values import filled, is_alike

_EXTRA_STATE = "_extra_state"
"""Ends the keys of what modules give beside parameters and buffers (``get_extra_state``)."""

OptimizerMatcher = Callable[["Walk", torch.optim.Optimizer, str, Any], Finisher | None]
"""Matches an optimizer, given its name and state, and returns what hands the new state over."""
CoordinateMatcher = Callable[["Walk", PerCoordinate, str], Rebuild | None]
"""Matches a value that belongs to a coordinate of a mesh, given its name."""


@dataclass(kw_only=True)
class Walk(SavedForms):
    """The template beside the tree, place by place; what is found is noted in ``found``."""

    match_optimizer: OptimizerMatcher
    match_coordinate: CoordinateMatcher
    within_per_rank: bool = field(init=False, default=False)
    within_object: bool = field(init=False, default=False)
    at_end: list[Callable[[], None]] = field(init=False, default_factory=list[Callable[[], None]])
    """Checks for which it has to be known what of the checkpoint the state takes."""
    filled: dict[int, tuple[Any, str]] = field(
        init=False, default_factory=dict[int, tuple[Any, str]]
    )
    """Containers that are filled in place, by id, with their names in the checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.found = Match(leaves=self.index.leaves)

    def run(self, template: Any) -> Rebuild | None:
        """Walk the whole; its objects are asked for their state dicts before all else."""
        rank, tell_alive = self.ranks.rank, self.ranks.tell_alive
        # Where an optimizer is selected, all objects tell names of its parameters. The checkpoint
        # says whether one is: ranks have to ask alike, since the answers may take collectives.
        asks_all = self.selection is not None and any(
            self.selection.may_reach(at) for at in optimizers_in(self.index)
        )
        self.visited = visit(
            template,
            rank,
            lambda name: asks_all or not self.cannot_reach(name),
            ask=_template_of,
            tell_alive=tell_alive,
            asks_all=False,
        )
        self.found.objects = self.visited.objects
        self.names = ParamNames(template, self.visited, rank)
        return self.node(template, "")

    @cached_property
    def tables(self) -> Tables:
        """The names of all tensors here and in the checkpoint, for the parameters of optimizers."""
        own = rank_component(self.ranks.rank)
        stored = {
            name if "@" not in name else plain_name(name): tensor
            for name, tensor in self.stored.items()
            if "@" not in name or all(p[:1] != "@" or p == own for p in name.split("/"))
        }
        return Tables(self.names, None if self.renaming is None else self.at, stored)

    def node_at(self, value: Any, name: str, place: str) -> Rebuild | None:
        """Walk a part of the state that stands at a given place in the checkpoint."""
        before, self.place = self.place, (name, place)
        try:
            return self.node(value, name)
        finally:
            self.place = before

    def finish(self) -> Match:
        for check in self.at_end:
            check()
        self.found.unexpected = [
            name
            for name in self.index.leaves
            if (name not in self.taken or name in self.expanded) and self.is_unexpected(name)
        ]
        self.found.idle = [] if self.renaming is None else self.renaming.idle()
        return self.found

    def node(self, value: Any, name: str) -> Rebuild | None:
        is_tensor = type(value) in PLAIN_TENSORS
        takes_form = self.takes_form or (
            not is_tensor and name and not self.takes_more and _is_nothing(value)
        )
        if takes_form and self.takes_saved_form(value, name, self.at(name)):
            return self.saved_form(value, name)
        if is_tensor:  # as nearly all values are
            return self.tensor(value, name)
        if isinstance(value, NewSubclass):
            return self.new_subclass(value, name)
        if is_subclass(value):
            return self.subclass(value, name)
        if tensor_tag(value) is not None:
            return self.tensor(value, name)
        if self.cannot_reach(name):
            return None  # and ask nobody for a state dict in vain
        if isinstance(value, PerRank):
            return self.per_rank(value, name)
        if isinstance(value, PerCoordinate):
            return self.match_coordinate(self, value, name)
        if is_stateful(value):
            return self.stateful(value, name)
        if dict_tag(value) is not None and value:
            return self.dict(value, name)
        if type(value) in SEQUENCES and value and not (self.takes_more and is_whole(value)):
            return self.sequence(value, name)
        return self.leaf(value, name)

    def tensor(self, value: Any, name: str) -> Rebuild | None:
        at = self.at(name)
        if self.index.find(at) is ABSENT:
            at = self.wrapped(at)
        if not self.is_selected(at):
            return None
        node = self.index.find(at)
        if node is ABSENT:
            found = self.found
            found.missing[at] = name
            found.absent[at] = value
            return (lambda: found.filled_in_place_of(at)) if is_meta(value) else None
        tag = tag_of(node)
        if tag not in TENSORS:
            saved = described(node) if tag == SUBCLASS else "a value"
            self.found.problems.append(f"{at}: a tensor is wanted, {saved} was saved")
            return None
        if not self.take(at, name):
            return None
        stored: str = node[tag]
        destinations = self.found.destinations
        destinations[stored] = value
        if self.within_per_rank:
            self.found.own.add(stored)
        return (lambda: destinations[stored]) if is_meta(value) else None

    def wrapped(self, at: str, inner: str = "") -> str:
        """Return what a tensor was saved as in a wrapper, or outside of one; else the same name.

        Not where more than one may be meant, or where that is another tensor of the state. One that
        consists of others is found by the component of the name of an ``inner`` one.
        """
        found = self.tables.stored_names.find(below(at, inner) if inner else at)
        if found is not None and inner:
            found = found.removesuffix(f"/{inner}")
        if found is None or found in self.tables.renamed.tensors:
            return at
        return found

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
        if node is not ABSENT and tag_of(node) != "per_rank":
            if self.selects_below(at):
                self.found.problems.append(
                    f"{at}: PerRank is wanted, a shared value was saved; give the value itself"
                )
            return None
        for rank, component, _ in [] if node is ABSENT else children(node):
            if rank == self.ranks.rank:
                continue
            names = [n for n in self.index.leaves_of(below(at, component)) if self.is_selected(n)]
            self.taken.update(names)
            if rank not in self.ranks.all:
                self.found.dropped += names
        if self.index.find(below(at, own)) is ABSENT:  # all of it, be it as large as may be
            if self.is_selected(below(at, own)) and value.new_rank == "keep" and node is not ABSENT:
                self.found.kept.append(below(at, own))
            elif self.is_selected(below(at, own)):
                self.found.missing[below(at, own)] = below(name, own)
            return None
        return self.own(value, name, below(name, own), below(at, own))

    def own(
        self, value: PerRank | PerCoordinate, name: str, inner: str, place: str
    ) -> Rebuild | None:
        """Walk a value called ``inner`` of which this rank is given what stands at ``place``."""
        outside, self.within_per_rank = self.within_per_rank, True
        rebuild = self.node_at(value.value, inner, place)
        self.within_per_rank = outside
        if rebuild is None:
            return None
        made = copy.copy(value)  # now: code of a class derived from it may raise

        def rebuild_own() -> Any:
            made.value = rebuild()
            return made

        return rebuild_own

    def stateful(self, value: Any, name: str) -> Rebuild | None:
        found = self.found
        state = self.visited.states[name]
        if comes_last(value):
            found.last.add(name)
        before = len(found.destinations), len(found.values), len(found.dealt)
        outside, self.within_object = (self.within_object, self.takes_form), True
        self.takes_form = not isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        if isinstance(value, torch.optim.Optimizer):
            finisher = self.match_optimizer(self, value, name, state)
            self.within_object, self.takes_form = outside
            if finisher is not None:
                found.finishers[name] = finisher
            return None
        rebuild = self.state_of_object(value, state, name) or (lambda: state)
        self.within_object, self.takes_form = outside
        found.names_of_objects[name] = tuple(islice(found.destinations, before[0], None))
        is_empty = (len(found.destinations), len(found.values), len(found.dealt)) == before
        if is_empty and not (self.takes_more and self.is_selected(self.at(name))):
            return None  # nothing to hand over, and nothing may change
        if isinstance(value, torch.nn.Module) and has_meta_tensors(value):
            new = dict(islice(found.destinations.items(), before[0], None))
            found.problems += foreign_tensors(value, new)
            found.adopters[name] = lambda replaced: adopt(value, wrapped_again(rebuild()), replaced)
        else:
            load_state_dict: Callable[[Any], object] = value.load_state_dict
            found.finishers[name] = lambda _: load_state_dict(wrapped_again(rebuild()))
        return None

    def state_of_object(self, value: Any, state: Any, name: str) -> Rebuild | None:
        """Match the state dict of an object that is no optimizer."""
        at = self.at(name)
        if not self.takes_form or not self.takes_saved_form(state, name, at):
            return self.node(state, name)
        rebuild = self.saved_form(state, name)
        if rebuild is None or isinstance(value, LRScheduler):
            return rebuild  # torch's schedulers keep attributes that other releases have not saved
        unsaved = self.unsaved_items(state, at, rebuild)
        for key, item in unsaved.items():
            self.node(item, below(name, key_component(key)))  # notes what is missing
        return (lambda: {**unsaved, **rebuild()}) if unsaved else rebuild

    def packed_container(self, value: Any, name: str) -> Rebuild | None:
        """Take a packed value for a container of the same structure; else expand it."""
        at = self.at(name)
        if at not in self.packed:
            return None
        if not self.is_selected(at):
            return None  # what is selected within such a value is expanded
        saved = self.packed_value(self.packed[at])
        if not is_alike(value, saved):
            self.expand(at)
            return None
        if not self.take(at, name):
            return lambda: value
        self.found.values.append(at)

        in_place, within_object = self.may_fill(value, name), self.within_object

        def may_fill(container: Any) -> bool:
            if container is value or within_object or isinstance(container, tuple):
                return container is value and in_place
            if id(container) in self.filled:  # it stands at another place, too
                return False
            self.filled[id(container)] = container, f"{at}/[{id(container)}]"
            return True

        return lambda: filled(value, saved, may_fill)

    def dict(self, value: Mapping[Any, Any], name: str) -> Rebuild | None:
        packed = self.packed_container(value, name) if self.packed else None
        if packed is not None:
            return packed
        if not self.is_kind(DICT_TAGS, value, name):
            return None
        if "param_groups" in value and self.selects_below(self.at(name)):
            problem = wrong_numbers(value, self.index, self.at(name))
            if problem:
                self.found.problems.append(problem)
                return None
        rebuilds: dict[Any, Rebuild] = {}
        for key, item in value.items():
            if type(key) not in (str, int):
                self.found.problems.append(f"{name}: no dict key {key!r} can have been saved")
                continue
            outside = self.takes_form
            self.takes_form |= self.within_object and str(key).endswith(_EXTRA_STATE)
            rebuild = self.node(item, below(name, key_component(key)))
            self.takes_form = outside
            if rebuild is not None:
                rebuilds[key] = rebuild
        if not rebuilds:
            return None
        into: Any = value if self.may_fill(value, name) else _copy_of(value)
        self.found.fills_foreign |= type(into) not in DICTS

        def rebuild_dict() -> Any:
            for key, item in rebuilds.items():
                into[key] = item()
            return into

        return rebuild_dict

    @property
    def takes_more(self) -> bool:
        """Whether the checkpoint may have more than the state without anybody hearing of it."""
        return self.options.strict == "state"

    def sequence(self, value: list[Any] | tuple[Any, ...], name: str) -> Rebuild | None:
        packed = self.packed_container(value, name) if self.packed else None
        if packed is not None:
            return packed
        if not self.is_kind(("list", "tuple"), value, name):
            return None
        if self.takes_more and isinstance(value, tuple):
            self.at_end.append(partial(self.refuse_more, name))
        rebuilds = [self.node(v, below(name, index_component(i))) for i, v in enumerate(value)]
        if not any(rebuilds):
            return None
        items = list(value)
        in_place = isinstance(value, list) and self.may_fill(value, name)

        def rebuild_sequence() -> Any:
            new = [
                old if made is None else made() for old, made in zip(items, rebuilds, strict=True)
            ]
            if in_place:
                value[:] = new  # pyright: ignore
                return value
            return new if isinstance(value, list) else tuple(new)

        return rebuild_sequence

    def refuse_more(self, name: str) -> None:
        """Note a problem where more was saved for a tuple than it has."""
        at = self.at(name)
        node = self.index.find(at)
        leaves = [] if node is ABSENT else self.index.leaves_of(at)
        more = [leaf for leaf in leaves if leaf not in self.taken and self.is_selected(leaf)]
        if more:
            self.found.problems.append(f"{at}: more was saved than this tuple has: {more[0]}")

    def may_fill(self, value: Any, name: str) -> bool:
        """Whether a container takes its new items itself; else a copy takes its place.

        What objects gave may be their own, to be changed by ``load_state_dict`` alone. A container
        that stands at two places is filled once, unless both were saved with the same values.
        """
        if self.within_object or not isinstance(value, list | MutableMapping):
            return False
        at = self.at(name)
        _, first = self.filled.setdefault(id(value), (value, at))
        return first == at or same_values(self.index.find(first), self.index.find(at))

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
        if self.takes_more and dict_tag(value) is not None:
            if node is not ABSENT and tag_of(node) in DICT_TAGS and not children(node):
                self.taken.add(at)
            return None  # a dict of nothing
        if node is ABSENT:
            if self.is_selected(at):
                self.found.missing[at] = name
            return None
        has_parts = tag_of(node) in CONTAINERS or tag_of(node) == SUBCLASS
        names = list(self.index.leaves_of(at)) if has_parts else [at]
        selected = [leaf for leaf in names if self.is_selected(leaf)]
        if not selected:
            return None
        tensors = [leaf for leaf in names if tag_of(self.index.nodes[leaf]) in TENSORS]
        is_container = dict_tag(value) is not None or type(value) in SEQUENCES
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
        return self.value(value, name, at)

    def value(self, value: Any, name: str, at: str) -> Rebuild | None:
        """Take the value that was saved at a place, in which there are no tensors."""
        node = self.index.nodes[at]
        names = list(self.index.leaves_of(at)) if tag_of(node) in CONTAINERS else [at]
        if not all(self.take(leaf, name) for leaf in names):
            return None
        self.found.values.append(at)

        def no_tensor(name: str, _tag: str) -> Any:
            raise LayoutMismatch(f"unexpected tensor {name!r}")

        loaded = self.value_of(node, no_tensor, at)
        if isinstance(value, io.BytesIO) and isinstance(loaded, bytes):
            return lambda: io.BytesIO(loaded)
        return lambda: loaded


def _is_nothing(value: Any) -> bool:
    """Whether a value holds the place of what there is not yet, such as the best weights."""
    return value is None or (type(value) in (dict, list, tuple) and not value)


def _template_of(value: Any) -> Any:
    """Return the form of an object's state; ``state_template()`` of one that has it costs less."""
    told = getattr(value, "state_template", None)
    return told() if callable(told) else state_dict_of(value)


def _copy_of(value: Mapping[Any, Any]) -> Any:
    """Return a container of its own for the same items; those that cannot change become dicts."""
    return copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
