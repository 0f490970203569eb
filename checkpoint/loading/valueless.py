"""What a load leaves without values, or no longer tied: modules that were made on the meta device.

A checkpoint has the parameters and persistent buffers of a module. Its other tensors are computed
by its constructor, which computes nothing on the meta device; ``to_empty()`` then gives them memory
with any content, and gives tied parameters memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...dtensor.torch_private import non_persistent_buffers
from ..ranks.text import some_names
from ..state.names import key_component
from ..state.tree import below
from ..tensors.local_tensor import LocalTensor
from ..tensors.materialising import has_meta_tensors, is_meta, memory_key
from .match import Match

_COMPUTE = (
    "What no checkpoint has is computed by constructors: make such modules on the CPU or another "
    "device and load into these, or assign the tensors after the load, or register the buffers "
    "with persistent=True before the save"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Valueless:
    """What of the modules of a state has no values after a load, or is no longer tied."""

    tensors: tuple[str, ...]
    """Tensors on the meta device, by names in the state."""
    computed: tuple[str, ...]
    """Those of them that no checkpoint of the module has."""
    untied: Mapping[str, str]
    """Parameters and buffers that were one tensor at the save, and are not now, by the name of the
    other one."""
    suspects: tuple[str, ...]
    """Tensors that no checkpoint has of modules with something ``untied``: of any content, if
    ``to_empty()`` is what has untied that."""

    def warning(self) -> str:
        """Return what to tell the user, with remedies; "" for nothing."""
        told: list[str] = []
        if self.computed:
            told.append(
                f"no values after the load: {some_names(self.computed)}, which are on the meta "
                "device, and no checkpoint has them"
            )
        if self.untied:
            pairs = [f"{name} to {other}" for name, other in self.untied.items()]
            told.append(
                f"tied at the save, and not now: {some_names(pairs)}. They have the same values, "
                "and training changes them apart; if they are to be one, tie them before an "
                "optimizer is made of them"
            )
            if self.suspects:
                told.append(
                    "If to_empty() has untied them, it has left without values what no checkpoint "
                    f"has, too: {some_names(self.suspects)}"
                )
        if self.computed or self.suspects:
            told.append(_COMPUTE)
        return ". ".join(told)


def find_valueless(
    found: Match, tensors: Mapping[str, LocalTensor], stored_names: Mapping[str, str]
) -> Valueless:
    """Look at the modules into which something was loaded.

    ``tensors`` are what was filled by the names in the checkpoint; ``stored_names`` tell by these
    which were one tensor at the save.
    """
    without: dict[str, bool] = {}
    untied: dict[str, str] = {}
    suspects: list[str] = []
    for at, module in _loaded_modules(found):
        if has_meta_tensors(module) or any(map(is_meta, _attributes(module).values())):
            without |= {below(at, key_component(k)): v for k, v in _on_meta(module).items()}
        own = _untied(found.names_of_objects.get(at, ()), tensors, stored_names)
        if own:
            untied |= own
            suspects += [below(at, key_component(key)) for key in _computed(module)]
    return Valueless(
        tensors=tuple(without),
        computed=tuple(name for name, is_computed in without.items() if is_computed),
        untied=untied,
        suspects=tuple(name for name in suspects if name not in without),
    )


def _loaded_modules(found: Match) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules of the state into which something was loaded, with their names in the state.

    Also those that an object with a state dict of its own holds as an attribute.
    """
    for at, value in found.objects.items():
        if not found.names_of_objects.get(at):
            continue
        if isinstance(value, nn.Module):
            yield at, value
        elif not isinstance(value, torch.optim.Optimizer):
            for name, part in getattr(value, "__dict__", {}).items():
                if isinstance(part, nn.Module):
                    yield f"{at}.{name}" if at else name, part


def _on_meta(module: nn.Module) -> dict[str, bool]:
    """Return the tensors of a module on the meta device, and whether no state dict has them."""
    computed = _computed(module)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers()), **computed}
    return {name: name in computed for name, value in named.items() if is_meta(value)}


def _computed(module: nn.Module) -> dict[str, Any]:
    """Return the tensors of a module that its state dict has not: buffers and attributes."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        start = f"{path}." if path else ""
        unsaved = non_persistent_buffers(part)
        own = {name: value for name, value in part.named_buffers(recurse=False) if name in unsaved}
        found |= {start + name: value for name, value in own.items()}
        found |= {start + name: value for name, value in _own_attributes(part).items()}
    return found


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return tensors that are attributes of a module or of those in it."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in _own_attributes(part).items()
    }


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {n: value for n, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _untied(
    names: Sequence[str],
    tensors: Mapping[str, LocalTensor],
    stored_names: Mapping[str, str],
) -> dict[str, str]:
    """Return the names whose tensor was that of an earlier one at the save, and is not now."""
    first: dict[str, str] = {}
    untied: dict[str, str] = {}
    for name in names:
        local = tensors.get(name)
        if local is None or not local.parts or 0 in local.shape:
            continue
        other = first.setdefault(stored_names[name], name)
        theirs = tensors[other].parts
        if memory_key(local.parts[0][1]) != memory_key(theirs[0][1]):
            untied[name] = other
    return untied
