"""Names within modules, without those that wrappers of modules add: known by their classes.

A model is saved under the same names whether it is compiled, spread by DDP or neither. Activation
checkpointing and FSDP1 leave their names out of state dicts themselves. What else calls a part of
it ``module`` keeps that name, as ``AveragedModel`` does, which has a count beside it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...dtensor.torch_private import compiled_modules

_LEFT_OUT = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What state dicts do not have of the names of modules."""


class UnwrappedState(OrderedDict[str, Any]):
    """The state dict of a module without the names of wrappers."""

    real_names: Mapping[str, str]
    """What each entry is called in the module's own state dict."""


def unwrapped(module: nn.Module, state: Any) -> Any:
    """Return the state dict of a module without the names of wrappers; the same if it has none."""
    names = plain_names(module, state) if isinstance(state, Mapping) else {}
    if all(name == plain for name, plain in names.items()):
        return state
    made = UnwrappedState((names[name], value) for name, value in state.items())
    made.real_names = {plain: name for name, plain in names.items()}
    vars(made).update(vars(state))  # the versions of its parts, by which modules convert it
    return made


def wrapped_again(state: Any) -> Any:
    """Return a state dict under the names that the module has for its entries."""
    if not isinstance(state, UnwrappedState):
        return state
    made = OrderedDict((state.real_names[name], value) for name, value in state.items())
    vars(made).update({key: value for key, value in vars(state).items() if key != "real_names"})
    return made


def plain_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return some names within a module with those that they have without wrappers.

    All stay as they are where two would become one.
    """
    told = list(names)
    prefixes = list(reversed(_prefixes(module)))  # the inner ones first
    if not prefixes:
        return {name: name for name in told}
    found: dict[str, str] = {}
    for name in told:
        plain = name
        for outer, inner in prefixes:
            if plain.startswith(outer + inner):
                plain = outer + plain[len(outer) + len(inner) :]
        found[name] = plain
    return found if len(set(found.values())) == len(told) else {name: name for name in told}


def _prefixes(module: nn.Module) -> list[tuple[str, str]]:
    """Return what the names of everything in a wrapper begin with, and what it adds to that."""
    compiled = compiled_modules()
    found: list[tuple[str, str]] = []
    for path, part in module.named_modules():
        if isinstance(part, compiled):
            added = "_orig_mod."
        elif isinstance(part, DistributedDataParallel | DataParallel):
            added = "module."
        else:
            continue
        outer = f"{path}." if path else ""
        for name in _LEFT_OUT:
            outer = outer.replace(name, "")
        found.append((outer, added))
    return found
