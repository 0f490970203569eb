"""Tensors on the meta device, which have a shape but no memory, and the real ones for them.

Until a load is proven good they are planned with *stand-ins*: tensors of their sizes on one single
element. Then each gets memory once, so that tied ones stay tied, and a module's parameters are
replaced by real ones.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtckpt.errors import LayoutMismatch

from ...dtensor.torch_private import storage_id
from .announced import announces, has_shards
from .transfer import in_huge_pages

Key = tuple[object, ...]


@dataclass(slots=True)
class Replaced:
    """What took the place of tensors without memory."""

    tensors: dict[Key, Any] = field(default_factory=dict[Key, Any])
    """Real tensors by the key of those without memory."""
    parameters: dict[int, nn.Parameter] = field(default_factory=dict[int, nn.Parameter])
    """Real parameters of modules by the ``id`` of the old ones, which are kept alive beside."""
    old: list[Any] = field(default_factory=list[Any])


def is_meta(value: Any) -> bool:
    """Whether a value is a tensor, or a DTensor with a shard, on the meta device."""
    if not isinstance(value, torch.Tensor):
        return False
    if has_shards(value):
        shards: Any = value
        return any(shard.tensor.is_meta for shard in shards.local_shards())
    return value.is_meta


def stand_in(value: Any, replaced: Replaced) -> Any:
    """Return a tensor to plan with: laid out like ``value``, with memory for one element.

    The same for all tensors that are one. LayoutMismatch for a tensor that announces its boxes
    itself: one with memory would not.
    """
    if announces(_local_of(value)):
        raise LayoutMismatch(
            "a tensor on the meta device announces which boxes it holds, and what takes its place "
            "would not; make the module on its device before the load, which then fills it in place"
        )

    def on_one_element(local: torch.Tensor) -> torch.Tensor:
        return torch.empty((), dtype=local.dtype, device="cpu").expand(local.shape)

    key = memory_key(value)
    if key not in replaced.tensors:
        replaced.tensors[key] = _with_local(value, on_one_element)
    return replaced.tensors[key]


def materialise(value: Any, replaced: Replaced, device: torch.device | str | None) -> Any:
    """Return a tensor like ``value`` with memory, the same for all tensors that are one.

    Its device is ``device``, or that of the mesh of a DTensor, or the CPU.
    """
    key = memory_key(value)
    if key not in replaced.tensors:
        where = _device_of(value, device)
        with torch.no_grad():
            made = _with_local(
                value,
                lambda local: in_huge_pages(
                    torch.empty_like(local, device=where, requires_grad=False)
                ),
            )
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, requires_grad=value.requires_grad)
        replaced.tensors[key] = made
        replaced.old.append(value)
    return replaced.tensors[key]


def will_be_host_memory(value: Any, device: torch.device | str | None) -> bool:
    """Whether the local part of what ``materialise`` returns is contiguous memory of the host."""
    return (
        torch.device(_device_of(value, device)).type == "cpu" and _local_of(value).is_contiguous()
    )


def _device_of(value: Any, device: torch.device | str | None) -> torch.device | str:
    if device is not None:
        return device
    return getattr(getattr(value, "device_mesh", None), "device_type", "cpu")


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers on the meta device."""
    return any(map(is_meta, module.parameters())) or any(map(is_meta, module.buffers()))


def foreign_tensors(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with tensors on the meta device that are none of the module's own."""
    own = {memory_key(p) for p in (*module.parameters(), *module.buffers()) if is_meta(p)}
    return [
        f"{name}: the state_dict() of {type(module).__name__} gives a tensor on the meta device "
        "that is none of its parameters and buffers; make the module on its device before the "
        "load, which then fills it in place"
        for name, value in state.items()
        if is_meta(value) and memory_key(value) not in own
    ]


def adopt(module: nn.Module, filled: Any, replaced: Replaced) -> None:
    """Give a module the real tensors and its state; parameters that were one stay one."""
    for part in module.modules():
        for name, param in list(part._parameters.items()):
            if param is not None and is_meta(param) and memory_key(param) in replaced.tensors:
                setattr(part, name, _parameter(param, replaced))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and is_meta(buffer) and memory_key(buffer) in replaced.tensors:
                setattr(part, name, replaced.tensors[memory_key(buffer)])
    module.load_state_dict(filled)


def _parameter(old: nn.Parameter, replaced: Replaced) -> nn.Parameter:
    if id(old) not in replaced.parameters:
        made = nn.Parameter(
            replaced.tensors[memory_key(old)].detach(), requires_grad=old.requires_grad
        )
        vars(made).update(vars(old))  # what users noted on it
        replaced.parameters[id(old)] = made
        replaced.old.append(old)
    return replaced.parameters[id(old)]


def memory_key(value: Any) -> Key:
    """Return what tensors have in common that are the same elements, were there memory."""
    local = _local_of(value)
    return (
        storage_id(local),
        local.storage_offset(),
        tuple(local.shape),
        local.stride(),
        local.dtype,
    )


def _local_of(value: Any) -> torch.Tensor:
    return value._local_tensor if hasattr(value, "_local_tensor") else value


def _with_local(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tensor of the same kind and layout with another local tensor."""
    if not hasattr(value, "_local_tensor"):
        return make(value.detach())
    local = make(value._local_tensor.detach())
    ours = sys.modules.get("dtckpt.dtensor.dtensor")
    if ours is not None and isinstance(value, ours.DTensor):
        return type(value)(local, value._spec)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
