"""Counts of the writes to the memory of a tensor, ``x.data`` included.

Torch counts the writes to a tensor and its views in one counter. ``x.data`` gets a counter of its
own, so that autograd does not notice what is written through it; a copied view has to.
"""

# pyright: reportPrivateUsage=false
# The counters are attributes of tensors of users, and known to this file alone.

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...mesh.spec import DTensorSpec
from ...torch_private import base_of, is_traced, num_writes
from ..wrapper import Wrapper

ATTRIBUTES = frozenset({"_counter", "_counters"})
"""Attributes that this file sets on tensors."""


class _Counters:
    """The counters of all tensors that share one memory and are no views of each other."""

    __slots__ = ("_counters", "_data", "_num_past", "_of_views")

    def __init__(self) -> None:
        self._counters: dict[int, Tensor] = {}
        self._num_past = 0
        self._data: tuple[DTensorSpec, Tensor, Any] | None = None
        self._of_views: dict[int, ref[Tensor]] = {}

    def add(self, counter: Tensor) -> None:
        self._counters[id(counter)] = counter

    def _end(self, counter: Tensor) -> None:
        """Keep the count of tensors that are gone."""
        if self._counters.pop(id(counter), None) is not None:
            self._num_past += num_writes(counter)

    def exceed(self, count: int) -> None:
        """Have the total be higher than a count."""
        self._num_past += max(count + 1 - self.total(), 0)

    def total(self) -> int:
        return self._num_past + sum([num_writes(c) for c in self._counters.values()])

    def data_of(self, tensor: Wrapper, get_data: Callable[[Tensor], Any]) -> Wrapper:
        """Return ``tensor.data`` of a tensor that is no view; all of them share a counter."""
        known = self._data
        if known is None or known[0] is not tensor.spec or known[1] is not tensor.local:
            if known is not None:
                self._end(_counter_of(known[2]))
            known = self._data = (tensor.spec, tensor.local, get_data(tensor))
            self.add(_counter_of(known[2]))
        made = known[2].detach()
        made._counters = self
        return made

    def data_of_view(self, tensor: Wrapper, get_data: Callable[[Tensor], Any]) -> Wrapper:
        """Return ``tensor.data`` of a view; its counter is held as long as it is there."""
        made = get_data(tensor)
        made._counters = self
        counter = _counter_of(made)
        self.add(counter)

        def end(_: object) -> None:
            del self._of_views[id(counter)]
            self._end(counter)

        self._of_views[id(counter)] = ref(made, end)
        return made


def total_writes(tensor: Tensor) -> int | None:
    """Return the writes to the memory of a tensor; None for inference tensors, which count none."""
    if torch.is_inference(tensor):
        return None
    counters: _Counters | None = vars(_root(tensor)).get("_counters")
    return num_writes(tensor) if counters is None else counters.total()


def counted_data(tensor: Wrapper, get_data: Callable[[Tensor], Any]) -> Any:
    """Return ``tensor.data``, made by torch's getter, so that writes to it are counted."""
    counters: _Counters | None = vars(tensor).get("_counters")
    if counters is not None:  # it was asked before, and is no view
        return counters.data_of(tensor, get_data)
    if torch.is_inference(tensor) or is_traced(tensor.local):
        return get_data(tensor)
    root: Any = _root(tensor)
    counters = _counters_of(root)
    return (counters.data_of if root is tensor else counters.data_of_view)(tensor, get_data)


def join_counts(tensor: Wrapper, other: Wrapper) -> None:
    """Count the writes to two tensors together: the first has got the memory of the other.

    Views of what it had before ask for the count of this tensor, too. It must not be lower than
    they know, or a write that they have not read yet would be lost.
    """
    before = total_writes(tensor)
    vars(tensor).pop("_counters", None)
    if torch.is_inference(tensor) or torch.is_inference(other) or is_traced(other.local):
        return
    counters = _counters_of(_root(other))
    counters.add(_counter_of(tensor))
    counters.exceed(before or 0)
    vars(tensor)["_counters"] = counters


def _root(tensor: Tensor) -> Tensor:
    """Return the tensor that a view is one of, else the tensor itself."""
    base = base_of(tensor)
    return tensor if base is None else base


def _counters_of(root: Any) -> _Counters:
    counters: _Counters | None = vars(root).get("_counters")
    if counters is None:
        counters = root._counters = _Counters()
        counters.add(_counter_of(root))
    return counters


def _counter_of(tensor: Any) -> Tensor:
    """Return a tensor that counts the writes to another one, and holds none of its memory."""
    counter: Any = vars(tensor).get("_counter")
    if counter is None:
        counter = tensor.detach()
        counter.local = torch.empty(0, device=counter.local.device)
        tensor._counter = counter
    return counter
