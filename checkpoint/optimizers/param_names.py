"""Names of the parameters of an optimizer.

An optimizer numbers its parameters. The numbers change with the order of its groups, with layers
that are frozen and from pipeline stage to pipeline stage, so state goes by names: those under which
the parameters themselves stand in the same state, else those that the optimizer was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from ..state.names import key_component
from ..state.tree import below
from ..tensors.materialising import Key, memory_key
from ..tensors.visiting import Visited, tensors_in
from .unwrapping import plain_names
from .wrappers import TensorNames, without_wrappers


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLabel:
    """What is known of the name of one parameter."""

    names: tuple[str, ...]
    """Names of the parameter itself in the state, the best one first."""
    given: str | None
    """Name that the optimizer was given for it, as a component of names."""
    text: str | None
    """Name that its state is saved under; None where nothing tells one."""


class ParamNames:
    """Names of the tensors in a state, but for the state of optimizers, for their parameters."""

    def __init__(self, state: Any, visited: Visited, rank: int) -> None:
        self._state = state
        self._visited = visited
        self._rank = rank

    def labels(
        self, optimizer: torch.optim.Optimizer, *, all_names: bool = False
    ) -> list[ParamLabel]:
        """Return the label of every parameter, in the optimizer's order.

        Of the names of a tied parameter the first one counts, in the order in which objects are
        visited, which ranks share, and within a module in its own. Names of parameters of modules
        that stand elsewhere in the state, too, are looked for with ``all_names`` only.
        """
        params = params_of(optimizer)
        found = [tuple(self._in_modules.get(id(param), ())) for param in params]
        if all_names or not all(found):
            by_memory = self._names_by_memory(params)
            pairs = zip(found, by_memory, strict=True)
            found = [tuple(dict.fromkeys((*names, *others))) for names, others in pairs]
        given = given_names(optimizer.param_groups)
        texts = self._texts(
            [
                plain_name(names[0]) if names else own
                for names, own in zip(found, given, strict=True)
            ]
        )
        return [
            ParamLabel(names=names, given=own, text=text)
            for names, own, text in zip(found, given, texts, strict=True)
        ]

    @cached_property
    def apart(self) -> TensorNames[torch.Tensor]:
        """All names without the marks of ranks."""
        return self.renamed(lambda name: name)

    def renamed(self, rename: Callable[[str], str]) -> TensorNames[torch.Tensor]:
        """Return all names as they are elsewhere, without the marks of ranks."""
        tensors = {plain_name(rename(name)): param for name, param in self._params_of_modules}
        tensors |= {plain_name(rename(name)): tensor for name, tensor in self._tensors}
        return TensorNames(tensors, lambda tensor: _key_of(tensor) or id(tensor))

    def _texts(self, names: Sequence[str | None]) -> list[str | None]:
        """Return names to save under: without wrappers, unless two tensors would have one name.

        None where two parameters have the same name, or one has a name within that of another.
        """
        chosen = list(names)
        short = [None if name is None else without_wrappers(name) for name in names]
        times = Counter(short)
        for number, (name, text) in enumerate(zip(names, short, strict=True)):
            if name is not None and name != text and times[text] == 1 and self.apart.is_clear(name):
                chosen[number] = text
        times = Counter(chosen)
        parents = {name.rpartition("/")[0] for name in chosen if name is not None}
        while more := {parent.rpartition("/")[0] for parent in parents} - parents:
            parents |= more
        return [name if times[name] == 1 and name not in parents else None for name in chosen]

    @cached_property
    def _in_modules(self) -> dict[int, list[str]]:
        """Names of the parameters of modules by the ``id`` of these."""
        found: dict[int, list[str]] = {}
        for name, param in self._params_of_modules:
            found.setdefault(id(param), []).append(name)
        return found

    @cached_property
    def _params_of_modules(self) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        for name, module in self._visited.objects.items():
            if isinstance(module, nn.Module):
                params = list(module.named_parameters(remove_duplicate=False))
                plain = plain_names(module, [inner for inner, _ in params])
                found += [(below(name, key_component(plain[n])), param) for n, param in params]
        return found

    @cached_property
    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All tensors of the state; those of a state dict are no parameters themselves."""
        objects = self._visited.objects
        return [
            found
            for at, value in {"": self._state, **self._visited.states}.items()
            if not isinstance(objects.get(at), torch.optim.Optimizer)
            for found in tensors_in(value, at, self._rank)
        ]

    def _names_by_memory(self, params: Sequence[torch.Tensor]) -> list[list[str]]:
        """Return the names of tensors that are the same elements as some parameters."""
        names: dict[Key, list[str]] = {}
        for name, tensor in self._tensors:
            key = _key_of(tensor)
            if key is not None:
                names.setdefault(key, []).append(name)
        keys = [_key_of(param) for param in params]
        times = Counter(keys)
        found = [[] if key is None or times[key] > 1 else names.get(key, []) for key in keys]
        return [
            # Tied, or only empty at one place: nothing tells.
            [] if len(those) > 1 and getattr(param, "_local_tensor", param).numel() == 0 else those
            for param, those in zip(params, found, strict=True)
        ]


def plain_name(name: str) -> str:
    """Return a name without the marks of ranks, which keep some state for themselves."""
    if "@" not in name:
        return name
    return "/".join(part for part in name.split("/") if not part.startswith("@"))


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer in the order of their numbers."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def given_names(groups: Iterable[Mapping[str, Any]]) -> list[str | None]:
    """Return the names that an optimizer was given with its parameters, as components of names."""
    found: list[str | None] = []
    for group in groups:
        params = cast(list[Any], group["params"])
        names = cast(Sequence[object], group.get("param_names") or ())
        known = len(names) == len(params) and all(isinstance(name, str) for name in names)
        found += (
            [key_component(cast(str, name)) for name in names] if known else [None] * len(params)
        )
    return found


def _key_of(tensor: torch.Tensor) -> Key | None:
    try:
        return memory_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None  # sparse ones, and wrappers of other tensors, have no storage
