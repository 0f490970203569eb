"""Objects with a state dict are asked for it once, in an order that all ranks share.

A ``state_dict()`` or ``load_state_dict()`` may make collectives. Ranks whose dicts list the same
objects in another order would then wait for each other in different ones, so objects are visited in
the order of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from dtckpt.errors import Unsavable

from ..state.limits import MAX_NESTING
from ..state.names import index_component, key_component, rank_component
from ..state.tree import DICTS, SEQUENCES, PerRank, dict_tag, is_stateful
from .local_shard import LocalShard
from .local_tensor import tensor_tag

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter})
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Visited:
    """The objects of a state and what they gave."""

    objects: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every object that stands for its state dict, by its name."""
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    """The state dict of every object that was asked."""

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
) -> Visited:
    """Ask all objects in a state for their state dicts; those that are not wanted are only noted.

    ``ask`` gets that of an object. ``tell_alive`` is called after each of them. Raises Unsavable
    for a container that holds itself.
    """

    visited = Visited()
    waiting = _objects_in(state, "", rank)
    while waiting:
        at, value = waiting.pop()
        visited.objects[at] = value
        if is_wanted(at):
            visited.states[at] = ask(value)
            tell_alive()
            waiting += _objects_in(visited.states[at], at, rank)
    return visited


def _objects_in(value: Any, name: str, rank: int) -> list[tuple[str, Any]]:
    """Return the objects in a state by their names, the last one first."""
    found: dict[str, Any] = {}
    _Search(rank, objects=found).run(value, name)
    return sorted(found.items(), key=lambda item: item[0], reverse=True)


def tensors_in(value: Any, name: str, rank: int) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in a state with their names, but for those that objects hold."""
    found: list[tuple[str, torch.Tensor]] = []
    _Search(rank, tensors=found).run(value, name)
    return found


def after_its_parts(name: str) -> str:
    """Return a key that sorts names so that what an object consists of comes before it."""
    return f"{name}/\U0010ffff"


def _component_of_key(key: object) -> str | None:
    return key_component(key) if isinstance(key, str | int) else None


class _Search:
    """Looks through containers for objects that have a state dict, or for tensors."""

    def __init__(
        self,
        rank: int,
        *,
        objects: dict[str, Any] | None = None,
        tensors: list[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.rank = rank
        self.objects = objects
        self.tensors = tensors
        self.passed = _ATOMS if tensors is None else _ATOMS.difference(_TENSORS)
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
        else:
            items = cast(Mapping[Any, Any], value).items()
        if id(value) in self.above:
            raise Unsavable(f"{name}: the container holds itself")
        if len(self.above) == MAX_NESTING:
            raise Unsavable(f"{name}: lies in more than {MAX_NESTING} containers")
        self.above.add(id(value))
        start = f"{name}/" if name else ""
        passed = self.passed
        for key, item in items:
            if type(item) in passed:
                continue
            component = component_of(key)
            if component is not None:
                self.run(item, start + component)
        self.above.discard(id(value))

    def is_leaf(self, value: Any, name: str) -> bool:
        """Note what is no container."""
        if type(value) in _TENSORS or tensor_tag(value) is not None:
            tensor: Any = value.tensor if isinstance(value, LocalShard) else value
            if self.tensors is not None and isinstance(tensor, torch.Tensor):
                self.tensors.append((name, tensor))
            return True
        if isinstance(value, PerRank):
            return False
        if is_stateful(value):
            if self.objects is not None:
                self.objects[name] = value
            return True
        return dict_tag(value) is None
