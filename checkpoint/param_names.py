"""Names of the parameters of an optimizer.

An optimizer numbers its parameters. The numbers change with the order of its groups, with layers
that are frozen and from pipeline stage to pipeline stage, so state goes by names: those under which
the parameters themselves stand in the same state, else those that the optimizer was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from .materialising import Key, memory_key
from .names import key_component
from .tree_index import below
from .visiting import Visited, tensors_in

_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile, DDP, FSDP and activation checkpointing add."""


def without_wrappers(name: str) -> str:
    """Return a name without what wrappers of modules add to it.

    >>> without_wrappers("model/_orig_mod.module.layers.0.weight")
    'model/layers.0.weight'
    """
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return "/".join(
        ".".join([p for p in component.split(".") if p not in _WRAPPERS] or [component])
        for component in name.split("/")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLabel:
    """What is known of the name of one parameter."""

    names: tuple[str, ...]
    """Names of the parameter itself in the state, the best one first."""
    given: str | None
    """Name that the optimizer was given for it, as a component of names."""
    text: str | None
    """Name that its state is saved under; None where nothing tells one."""


@dataclass(slots=True)
class ParamNames:
    """Names of the tensors in a state, for the parameters of optimizers."""

    _in_modules: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    _by_memory: dict[Key, list[str]] = field(default_factory=dict[Key, list[str]])

    def labels(self, optimizer: torch.optim.Optimizer) -> list[ParamLabel]:
        """Return the label of every parameter, in the optimizer's order.

        A parameter with several names (tied ones) goes by the first of these in the alphabet.
        """
        params = params_of(optimizer)
        keys = [_key_of(param) for param in params]
        times = Counter(key for key in keys if key is not None)
        found = [
            self._names(param, key if key is not None and times[key] == 1 else None)
            for param, key in zip(params, keys, strict=True)
        ]
        given = _given_names(optimizer)
        texts = _texts(
            [names[0] if names else own for names, own in zip(found, given, strict=True)]
        )
        return [
            ParamLabel(names=names, given=own, text=text)
            for names, own, text in zip(found, given, texts, strict=True)
        ]

    def add_module(self, name: str, module: nn.Module) -> None:
        """Note the parameters of a module that stands in the state."""
        for inner, param in module.named_parameters(remove_duplicate=False):
            names = self._in_modules.setdefault(id(param), [])
            names.append(below(name, key_component(inner)))

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that stands in the state: that of a state dict is no parameter itself."""
        key = _key_of(tensor)
        if key is not None:
            self._by_memory.setdefault(key, []).append(name)

    def _names(self, param: torch.Tensor, key: Key | None) -> tuple[str, ...]:
        in_modules = sorted(self._in_modules.get(id(param), []))
        by_memory = [] if key is None else sorted(self._by_memory.get(key, []))
        if len(by_memory) > 1 and getattr(param, "_local_tensor", param).numel() == 0:
            by_memory = []  # tied, or only empty at one place: nothing tells
        return tuple(dict.fromkeys((*in_modules, *by_memory)))


def names_around(state: Any, visited: Visited, rank: int) -> ParamNames:
    """Return the names of the tensors in a state, but for the state of optimizers.

    What a rank keeps for itself (PerRank) goes without the mark of the rank.
    """
    names = ParamNames()
    optimizers = {n for n, v in visited.objects.items() if isinstance(v, torch.optim.Optimizer)}
    if not optimizers:
        return names  # nobody will ask
    for name, value in visited.objects.items():
        if isinstance(value, nn.Module):
            names.add_module(_plain(name), value)
    for at, value in {"": state, **visited.states}.items():
        if at not in optimizers:
            for name, tensor in tensors_in(value, at, rank):
                names.add_tensor(_plain(name), tensor)
    return names


def _plain(name: str) -> str:
    """Return a name without the marks of ranks."""
    if "@" not in name:
        return name
    return "/".join(part for part in name.split("/") if not part.startswith("@"))


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer in the order of their numbers."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _given_names(optimizer: torch.optim.Optimizer) -> list[str | None]:
    """Return the names that an optimizer was given with its parameters, where it was."""
    found: list[str | None] = []
    for group in optimizer.param_groups:
        params = cast(list[Any], group["params"])
        names = cast(Sequence[object], group.get("param_names") or ())
        known = len(names) == len(params) and all(isinstance(name, str) for name in names)
        found += (
            [key_component(cast(str, name)) for name in names] if known else [None] * len(params)
        )
    return found


def _texts(names: Iterable[str | None]) -> list[str | None]:
    """Return names to save under: without wrappers, unless that would make two of them one.

    None where two parameters have the same name, or one has a name within that of another.
    """
    names = list(names)
    short = [None if name is None else without_wrappers(name) for name in names]
    times = Counter(short)
    chosen = [s if times[s] == 1 else name for name, s in zip(names, short, strict=True)]
    times = Counter(chosen)
    parents = {name.rpartition("/")[0] for name in chosen if name is not None}
    while more := {parent.rpartition("/")[0] for parent in parents} - parents:
        parents |= more
    return [name if times[name] == 1 and name not in parents else None for name in chosen]


def _key_of(tensor: torch.Tensor) -> Key | None:
    try:
        return memory_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None  # sparse ones, and wrappers of other tensors, have no storage
