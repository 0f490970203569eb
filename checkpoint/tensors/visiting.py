"""Objects with a state dict are asked for it once, in an order that all ranks share.

A ``state_dict()`` or ``load_state_dict()`` may make collectives. Ranks whose dicts list the same
objects in another order would then wait for each other in different ones, so objects are visited in
the order of their names, and those that say so (``comes_last``) after all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch

from dtckpt.errors import Unsavable

from ..state.coordinates import VALUES, PerCoordinate
from ..state.limits import MAX_NESTING
from ..state.names import index_component, key_component, rank_component
from ..state.tree import DICTS, SEQUENCES, PerRank, below, dict_tag, is_stateful
from .announced import PLAIN_TENSORS
from .local_shard import LocalShard
from .local_tensor import tensor_tag

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter})


@dataclass(slots=True)
class Visited:
    """The objects of a state and what they gave."""

    objects: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every object that stands for its state dict, by its name."""
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    """The state dict of every object that was asked."""
    given_whole: set[str] = field(default_factory=set[str])
    """Names of the objects that take what was saved for a coordinate as it is."""

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules among the objects."""
        return [value for value in self.objects.values() if isinstance(value, torch.nn.Module)]


def visit(
    state: Any,
    rank: int,
    is_wanted: Callable[[str], bool] = lambda _: True,
    *,
    ask: Callable[[Any], Any] = lambda value: value.state_dict(),
    tell_alive: Callable[[], None] = lambda: None,
    asks_all: bool = True,
) -> Visited:
    """Ask all objects in a state for their state dicts; those that are not wanted are only noted.

    ``ask`` gets that of an object. ``tell_alive`` is called after each of them. Without
    ``asks_all`` those are not asked that take what was saved as it is. Raises Unsavable for a
    container that holds itself.
    """

    visited = Visited()
    waiting = _objects_in(state, "", rank, visited)
    while waiting:
        at, value = waiting.pop()
        visited.objects[at] = value
        if is_wanted(at) and (asks_all or at not in visited.given_whole):
            visited.states[at] = ask(value)
            tell_alive()
            waiting += _objects_in(visited.states[at], at, rank, visited)
    return visited


def _objects_in(value: Any, name: str, rank: int, visited: Visited) -> list[tuple[str, Any]]:
    """Return the objects in a state by their names, the last one first."""
    found: dict[str, Any] = {}
    _Search(rank, objects=found, given_whole=visited.given_whole).run(value, name)
    return sorted(found.items(), key=lambda item: (comes_last(item[1]), item[0]), reverse=True)


def tensors_in(value: Any, name: str, rank: int) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in a state with their names, but for those that objects hold."""
    found: list[tuple[str, torch.Tensor]] = []
    _Search(rank, tensors=found).run(value, name)
    return found


def is_given_whole(value: object) -> bool:
    """Whether an object that belongs to a coordinate of a mesh takes what was saved as it is.

    That of others tells where their tensors are to go.
    """
    return is_stateful(value) and not isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def comes_last(value: object) -> bool:
    """Whether an object is asked and loaded after all others, as it says itself.

    Others may draw random numbers as they are asked or loaded, or count what they have done.
    """
    return bool(getattr(value, "comes_last", False))


def after_its_parts(name: str) -> str:
    """Return a key that sorts names so that what an object consists of comes before it."""
    return f"{name}/\U0010ffff"


def is_whole(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a sequence is one value: a list of plain values, or a tuple without tensors.

    Where a checkpoint may have more than the state such a one is taken over whole. Elements are
    found by their position: a list that was saved longer would lose its end, which nobody had
    asked for, and nobody would miss.

    >>> is_whole([1, [2, 3]]), is_whole(({"lr": 1.0},)), is_whole([{"lr": 1.0}])
    (True, True, False)
    """
    return not _has_parts(value, of_dicts=isinstance(value, tuple))


def _has_parts(value: Any, *, of_dicts: bool) -> bool:
    """Whether there is something that is filled in place; within dicts only if they are no part."""
    if (
        tensor_tag(value) is not None
        or isinstance(value, PerRank | PerCoordinate)
        or is_stateful(value)
    ):
        return True
    if dict_tag(value) is not None:
        return not of_dicts or any(_has_parts(item, of_dicts=True) for item in value.values())
    if type(value) not in SEQUENCES:
        return False
    return any(_has_parts(item, of_dicts=of_dicts) for item in value)


def _component_of_key(key: object) -> str | None:
    return key_component(key) if isinstance(key, str | int) else None


def _component_of_own(rank: int) -> str:
    return f"{VALUES}/{rank_component(rank)}"


class _Search:
    """Looks through containers for objects that have a state dict, or for tensors."""

    def __init__(
        self,
        rank: int,
        *,
        objects: dict[str, Any] | None = None,
        tensors: list[tuple[str, torch.Tensor]] | None = None,
        given_whole: set[str] | None = None,
    ) -> None:
        self.rank = rank
        self.objects = objects
        self.tensors = tensors
        self.given_whole = given_whole
        self.passed = _ATOMS if tensors is None else _ATOMS.difference(PLAIN_TENSORS)
        """What need not be looked at."""
        self.above: set[int] = set()

    def run(self, value: Any, name: str) -> None:
        """Look at a value that is no atom, as states may hold very many of these."""
        items: Iterable[tuple[Any, Any]]
        kind, component_of = type(value), _component_of_key
        if kind in SEQUENCES:
            items, component_of = enumerate(value), index_component
        elif kind not in DICTS and self.is_leaf(value, name):
            return
        elif isinstance(value, PerRank):
            items, component_of = [(self.rank, value.value)], rank_component
        elif isinstance(value, PerCoordinate):
            items, component_of = [(self.rank, value.value)], _component_of_own
            if self.given_whole is not None and is_given_whole(value.value):
                self.given_whole.add(below(name, _component_of_own(self.rank)))
        else:
            items = cast(Mapping[Any, Any], value).items()
        if id(value) in self.above:
            raise Unsavable(f"{name}: the container holds itself")
        if len(self.above) == MAX_NESTING:
            raise Unsavable(f"{name}: lies in more than {MAX_NESTING} containers")
        passed = self.passed
        if (kind in SEQUENCES or kind in DICTS) and self.holds_atoms(value):
            return
        self.above.add(id(value))
        start = f"{name}/" if name else ""
        for key, item in items:
            if type(item) in passed:
                continue
            component = component_of(key)
            if component is not None:
                self.run(item, start + component)
        self.above.discard(id(value))

    def holds_atoms(self, value: Any) -> bool:
        """Whether there are atoms alone in a container and those within, maybe millions of them.

        They are looked at level by level, in loops of C.
        """
        passed = self.passed
        level: Collection[Any] = value if type(value) in SEQUENCES else value.values()
        for _ in range(MAX_NESTING - len(self.above)):
            if passed.issuperset(map(type, level)):
                return True
            # Each once: a container may be in many places.
            inner = {id(item): item for item in level if type(item) not in passed}.values()
            if not all(type(item) in SEQUENCES or type(item) in DICTS for item in inner):
                return False
            within = (item if type(item) in SEQUENCES else item.values() for item in inner)
            level = list(chain.from_iterable(within))
        return False

    def is_leaf(self, value: Any, name: str) -> bool:
        """Note what is no container."""
        if type(value) in PLAIN_TENSORS or tensor_tag(value) is not None:
            tensor: Any = value.tensor if isinstance(value, LocalShard) else value
            if self.tensors is not None and isinstance(tensor, torch.Tensor):
                self.tensors.append((name, tensor))
            return True
        if isinstance(value, PerRank | PerCoordinate):
            return False
        if is_stateful(value):
            if self.objects is not None:
                self.objects[name] = value
            return True
        return dict_tag(value) is None
