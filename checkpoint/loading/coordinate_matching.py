"""Values of coordinates: which saved one is for the coordinate that this rank has now."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from dtckpt.errors import CheckpointError, LayoutMismatch, PlacementError

from ...dtensor.geometry.mesh import Mesh
from ..state.coordinates import (
    MESH,
    VALUES,
    Coordinate,
    Dealing,
    Matcher,
    PerCoordinate,
    mesh_of_node,
)
from ..state.names import rank_component
from ..state.subclass_node import SUBCLASS
from ..state.tree import (
    ABSENT,
    TENSORS,
    Node,
    below,
    children,
    is_stateful,
    packed_name,
    packed_nodes,
    tag_of,
    tensor_names,
    unflatten,
)
from ..tensors.visiting import is_given_whole
from .match import Rebuild
from .walk import Walk


def match_coordinate(walk: Walk, value: PerCoordinate, name: str) -> Rebuild | None:
    """Walk a value of a coordinate; its problems are noted, and None is returned then."""
    return _Matching(walk, value, name).run()


@dataclass
class _Matching:
    walk: Walk
    value: PerCoordinate
    name: str

    @property
    def at(self) -> str:
        return self.walk.at(self.name)

    @property
    def own_name(self) -> str:
        """What the value of this rank is called in the state."""
        return below(below(self.name, VALUES), rank_component(self.walk.ranks.rank))

    def run(self) -> Rebuild | None:
        walk, found = self.walk, self.walk.found
        node = walk.index.find(self.at)
        if node is ABSENT:
            if walk.is_selected(self.at):
                found.missing[self.at] = self.name
            return None
        if not walk.selects_below(self.at):
            return None
        if not all(map(walk.is_selected, walk.index.leaves_of(self.at))):
            found.problems.append(f"{self.at}: only a part of it is selected, but it has no parts")
            return None
        values = walk.index.find(below(self.at, VALUES))
        if walk.index.find(below(self.at, MESH)) is ABSENT or tag_of(values or None) != "per_rank":
            found.problems.append(
                f"{self.at}: a value by coordinates of a mesh is wanted (PerCoordinate), "
                f"{_told(node)} was saved; give it as it was saved"
            )
            return None
        try:
            wanted, own = self.value.place(walk.ranks.rank, walk.ranks.all)
        except PlacementError as error:
            found.problems.append(f"{self.name}: {error}")
            return None
        self.take_all()
        return self.match(Dealing(saved=self.saved, wanted=wanted, coordinate=own))

    @cached_property
    def saved(self) -> Mesh:
        node = self.walk.index.nodes[below(self.at, MESH)]
        return mesh_of_node(unflatten(node, _no_tensor, allow_pickle=False), self.at)

    def take_all(self) -> None:
        """Note that every coordinate has a place, some other rank's or a rule's."""
        walk = self.walk
        if self.at in walk.taken:
            walk.found.problems.append(f"{self.at}: wanted twice, the second time as {self.name}")
        walk.taken.update([self.at, *walk.index.leaves_of(self.at)])

    def match(self, dealing: Dealing) -> Rebuild | None:
        rule, found = self.value.resize, self.walk.found
        has_moved = _sizes(dealing.saved) != _sizes(dealing.wanted)
        if isinstance(rule, Matcher):
            return self.deal(rule, dealing)
        if has_moved and rule == "error":
            found.problems.append(
                f"{self.at}: saved for coordinates {dealing.saved}, and there are "
                f"{dealing.wanted} now. Give PerCoordinate a resize= that says what each of these "
                "gets: a function is given all saved values"
            )
            return None
        if has_moved and callable(rule):
            return self.deal(_OfAll(rule), dealing)
        source = self.same(dealing.saved, dealing.wanted, dealing.coordinate)
        if has_moved:
            self.note_dropped(dealing)
        if source is None:
            found.kept.append(self.at)
            return None
        return self.one(source)

    def same(self, saved: Mesh, wanted: Mesh, coordinate: Coordinate) -> Coordinate | None:
        """Return the coordinate of the same numbers along axes of the same names, if there is."""
        here = dict(zip(wanted.axis_names, coordinate, strict=True))
        if any(here[name] for name in here.keys() - set(saved.axis_names)):
            return None
        at = tuple(here.get(name, 0) for name in saved.axis_names)
        return at if all(i < n for i, n in zip(at, saved.shape, strict=True)) else None

    def note_dropped(self, dealing: Dealing) -> None:
        """Tell of saved coordinates that nobody has now."""
        wanted = dealing.wanted
        for coordinate in dealing.saved.coordinates():
            if self.same(wanted, dealing.saved, coordinate) is None:
                self.walk.found.dropped.append(self.place(coordinate))

    def place(self, coordinate: Coordinate) -> str:
        """Return where the value of a saved coordinate stands in the checkpoint."""
        rank = rank_component(self.saved.rank(coordinate))
        return below(below(self.at, VALUES), rank)

    def one(self, source: Coordinate) -> Rebuild | None:
        """Give this rank the value of one coordinate."""
        place = self.place(source)
        if self.walk.index.find(place) is ABSENT:
            self.walk.found.missing[place] = self.own_name
            return None
        if is_given_whole(self.value.value):
            return self.hand_over(self.whole(place))
        self.walk.taken.difference_update(self.walk.index.leaves_of(place))
        return self.walk.own(self.value, self.name, self.own_name, place)

    def deal(self, rule: Matcher, dealing: Dealing) -> Rebuild | None:
        """Give this rank what a rule makes of saved values."""
        wholes: dict[Coordinate, Rebuild] = {}
        for source in rule.sources(dealing, lambda at: self.peek(self.place(at))):
            wholes[source] = self.whole(self.place(source))
        if self.same(dealing.saved, dealing.wanted, dealing.coordinate) not in wholes or (
            isinstance(rule, _OfAll)
        ):
            self.walk.found.dealt.append(self.at)

        def made() -> Any:
            return rule.value(dealing, {at: whole() for at, whole in wholes.items()})

        nodes = (self.walk.index.nodes[self.place(at)] for at in wholes)
        if any(map(_tensors_of, nodes)):
            return self.hand_over(made)
        value = made()  # now, as it may refuse
        return self.hand_over(lambda: value)

    def peek(self, place: str) -> Any:
        """Return a value with None in the place of its tensors."""
        node = self.walk.index.find(place)
        if node is ABSENT:
            return None
        return self.walk.value_of(node, _nothing, place, make=_no_subclass)

    def whole(self, place: str) -> Rebuild:
        """Have a value read as it was saved, its tensors into memory of the CPU that is new."""
        walk, found = self.walk, self.walk.found
        node = walk.index.find(place)
        if node is ABSENT:
            found.missing[place] = self.own_name
            return lambda: None
        for packed in packed_nodes(node):
            walk.bytes_of(packed_name(packed))  # now, as nothing has changed yet
        for tensor in _tensors_of(node):
            stored = walk.stored[tensor]
            empty = torch.empty(
                stored.shape, dtype=getattr(torch, stored.dtype.torch_name), device="cpu"
            )
            found.destinations.setdefault(tensor, empty)
            found.own.add(tensor)
        found.values += [
            leaf
            for leaf in walk.index.leaves_of(place)
            if tag_of(walk.index.nodes[leaf]) not in TENSORS
        ]

        def read(tensor: str, tag: str) -> Any:
            value = found.destinations[tensor]
            return cast(np.ndarray[Any, Any], value.numpy()) if tag == "ndarray" else value

        if any(tag_of(walk.index.nodes[name]) == SUBCLASS for name in self.names_below(place)):
            try:
                walk.value_of(node, read, place)  # whether its classes can make it
            except CheckpointError as error:
                found.problems.append(str(error))
        return lambda: walk.value_of(node, read, place)

    def names_below(self, place: str) -> list[str]:
        """Return the names of all nodes at and below a place."""
        start = f"{place}/"
        return [name for name in self.walk.index.nodes if name == place or name.startswith(start)]

    def hand_over(self, rebuild: Rebuild) -> Rebuild | None:
        """Give a value to the object that wants it, or put it where the state has it."""
        walk, wanted = self.walk, self.value.value
        if not is_stateful(wanted):
            made = copy.copy(self.value)

            def replaced() -> Any:
                made.value = rebuild()
                return made

            return replaced
        walk.found.finishers[self.own_name] = lambda _: wanted.load_state_dict(rebuild())
        return None


@dataclass(frozen=True, slots=True)
class _OfAll:
    """A function of all values."""

    function: Any

    def sources(self, dealing: Dealing, peek: object) -> list[Coordinate]:
        return list(dealing.saved.coordinates())

    def value(self, dealing: Dealing, values: Mapping[Coordinate, Any]) -> Any:
        return self.function(values, dealing)


def _sizes(mesh: Mesh) -> dict[str, int]:
    """Return sizes by names; an axis of one coordinate is as good as none."""
    return {n: k for n, k in zip(mesh.axis_names, mesh.shape, strict=True) if k > 1}


def _told(node: object) -> str:
    tag = tag_of(node)
    if tag == "per_rank":
        return f"one by ranks (PerRank, of {len(children(node))} ranks)"
    return f"a {tag}" if tag else "a value"


def _tensors_of(node: Node) -> list[str]:
    """Return the names of tensors in a value, without those of packed values."""
    packed = set(map(packed_name, packed_nodes(node)))
    return [name for name in tensor_names(node) if name not in packed]


def _nothing(_name: str, _tag: str) -> None:
    return None


def _no_subclass(_node: Node, _tensors: dict[str, Any], _name: str) -> None:
    return None


def _no_tensor(name: str, _tag: str) -> Any:
    raise LayoutMismatch(f"unexpected tensor {name!r} in a mesh")
