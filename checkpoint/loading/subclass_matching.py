"""Matching tensors that consist of others: the walk of a state goes on with these.

Those that are there are filled in place. Those that the load makes (``NewSubclass``) are made once
their tensors are filled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from dtckpt.errors import Unsavable

from ..state.names import key_component
from ..state.subclass_node import inner_nodes
from ..state.tree import ABSENT, Node, below
from ..tensors.new_subclasses import NewSubclass
from ..tensors.subclasses import difference, take_apart
from .lookup import Lookup
from .match import Match, Rebuild


@dataclass(kw_only=True)
class Subclasses(Lookup, ABC):
    """The part of a walk that matches tensors without memory of their own."""

    found: Match = field(init=False)
    takes_form: bool = field(init=False, default=False)
    """Whether what was saved decides about the form of the state: that of objects but modules."""

    @abstractmethod
    def wrapped(self, at: str, inner: str = "") -> str:
        """Return what a tensor was saved as in a wrapper, or outside of one."""

    @abstractmethod
    def node_at(self, value: Any, name: str, place: str) -> Rebuild | None:
        """Match a part of the state that stands at a given place in the checkpoint."""

    def subclass(self, value: Any, name: str) -> None:
        """Match a tensor that consists of others: these are filled in place, one by one.

        Unless all of them are, its elements would be neither those of before nor those saved.
        """
        at = self.at(name)
        if self.index.find(at) is ABSENT:
            at = self.wrapped_subclass(value, name, at)
        node = self.index.find(at)
        names = [at] if node is ABSENT else list(self.index.leaves_of(at))
        selected = sum(map(self.is_selected, names))
        if not selected:
            return
        if node is ABSENT:
            self.found.missing[at] = name
            return
        problem = difference(node, value, name)
        if not problem and selected < len(names):
            problem = "only a part of it is selected, but it is one tensor; select all of it"
        if not problem:
            problem = self.other_dtype(node, value, name)
        if problem:
            self.found.problems.append(f"{at}: {problem}")
            return
        parts = take_apart(name, value, allow_pickle=True)
        self.inner_tensors([(key_component(k), t) for k, t in parts.tensors.items()], name, at)

    def wrapped_subclass(self, value: Any, name: str, at: str) -> str:
        """Return what it was saved as in a wrapper, by the name of its first tensor."""
        try:
            first = key_component(next(iter(take_apart(name, value, allow_pickle=True).tensors)))
        except Unsavable:
            return at  # which is told where it is looked for
        return self.wrapped(at, first)

    def other_dtype(self, node: Node, value: Any, name: str) -> str:
        """Say which inner tensor has another dtype than was saved: codes are not converted."""
        for key, inner in take_apart(name, value, allow_pickle=True).tensors.items():
            stored = inner_nodes(node)[key].get("tensor")
            saved = self.stored.get(stored) if isinstance(stored, str) else None
            if saved is not None and str(inner.dtype) != f"torch.{saved.dtype.torch_name}":
                return f"{key} of it was saved as {saved.dtype.torch_name}, and is {inner.dtype}"
        return ""

    def new_subclass(self, value: NewSubclass, name: str) -> Rebuild:
        """Match the tensors of which a subclass is made once they are filled."""
        self.inner_tensors(value.items, name, self.at(name))
        return value.make

    def inner_tensors(self, items: list[tuple[str, Any]], name: str, at: str) -> None:
        """Match the tensors of which a subclass consists: these very ones are filled."""
        outside, self.takes_form = self.takes_form, False
        for component, inner in items:
            self.node_at(inner, below(name, component), below(at, component))
        self.takes_form = outside
