"""Elements by their place in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.box import row_major_strides
from ..tensor.schemas import base_name
from .engine.rules import needs_whole
from .engine.table import LocalCall, OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
def as_strided_rule(call: OpCall) -> Rule:
    """Elements by their place in memory: that of the whole tensor, with its own strides."""
    if call.specs[0].stride != row_major_strides(call.specs[0].shape):
        _require_own_memory(call)
    return needs_whole(call, _with_global_strides)


def _require_own_memory(call: OpCall) -> None:
    """Raise PlacementError where places lie between the elements, as beside those of a slice."""
    source, first = call.specs[0], 2 if base_name(call.op) == "as_strided_scatter" else 1
    sizes, strides = call.args[first], call.args[first + 1]
    offset = call.arg("storage_offset") or 0
    is_own = torch.zeros(max(_extent(source.shape, source.stride), 0), dtype=torch.bool)
    is_own.as_strided(source.shape, source.stride).fill_(True)
    if not is_own.as_strided(sizes, strides, offset).all():
        raise PlacementError(
            f"{call.op} reads {source} with the strides {source.stride} by places in memory that "
            "are not all its own; take it of the tensor that this is a part of"
        )


def _with_global_strides(local: LocalCall) -> Callable[..., Any]:
    op, stride = local.op, local.call.specs[0].stride
    is_scatter = base_name(op) == "as_strided_scatter"

    def run(tensor: Tensor, *args: Any, storage_offset: int | None = None, **kwargs: Any) -> Tensor:
        if tensor.stride() != stride and tensor.numel():
            tensor = _with_strides(tensor, stride)
        count = 3 if is_scatter else 2
        given = args[count] if len(args) > count else storage_offset
        offset = tensor.storage_offset() + (given or 0)  # a DTensor itself starts at 0
        return op(tensor, *args[:count], offset, **kwargs)

    return run


def _with_strides(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a copy with other strides, by which elements that are equal may share memory."""
    places = torch.arange(_extent(tensor.shape, stride), device=tensor.device)
    memory = tensor.new_empty(places.shape)
    memory[places.as_strided(tensor.shape, stride)] = tensor
    return memory.as_strided(tensor.shape, stride)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum(step * (size - 1) for step, size in zip(stride, shape, strict=True))
