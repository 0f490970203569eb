"""Largest and smallest elements, and their places.

Values alone are Partial results. Where places are asked for, each rank names its best, and the best
of those is the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import Replicate, Shard
from ..tensor.schemas import base_name
from .engine.dims import dims_of
from .engine.forms import operators
from .engine.primitives import (
    ascending,
    cut_axes,
    is_cut,
    on_locals,
    reduced,
    reduced_spec,
    replicated,
)
from .engine.rules import named_dims, over_whole_dims, reducing
from .engine.table import Decomposition, LocalCall, OpCall, Rule, decomposition, in_any_order, rule

aten, prims = torch.ops.aten, torch.ops.prims

_REDUCE_OPS = {"max": "max", "amax": "max", "min": "min", "amin": "min"}


@rule(*operators(aten, "amax amin max min"), *operators(prims, "amax amin"))
def extremes_rule(call: OpCall) -> Rule:
    """Largest and smallest over some dims or all."""
    reduce_op = _REDUCE_OPS[base_name(call.op)]
    if call.op in (aten.max.default, aten.min.default) and 0 in call.specs[0].shape:
        # Which the operator refuses with values only.
        raise RuntimeError(f"{reduce_op}() of a tensor without elements ({call.specs[0]})")
    return reducing(call, reduce_op, local=_or_identity)


@in_any_order
def _or_identity(local: LocalCall) -> Callable[..., Any] | None:
    """Return what a rank without elements gives: the number that changes no extreme."""
    source = local.inputs[0]
    if source.box is None or all(source.box.sizes[d] for d in named_dims(local.call)):
        return None
    shape = local.output_shape
    identity = _identity(_REDUCE_OPS[base_name(local.call.op)], source.dtype)

    def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor.new_full(shape, identity)

    return run


def _identity(reduce_op: str, dtype: torch.dtype) -> Any:
    """Return the value that changes no maximum or minimum of ``dtype``."""
    if dtype == torch.bool:
        return reduce_op == "min"
    if dtype.is_floating_point:
        return float("-inf") if reduce_op == "max" else float("inf")
    if dtype.is_complex:  # without an order: all results are empty, or refused on all ranks
        return 0
    info = torch.iinfo(dtype)
    return info.min if reduce_op == "max" else info.max


rule(aten.argmax.default, aten.argmin.default, aten.aminmax.default, aten.max.dim, aten.min.dim)(
    over_whole_dims
)

_NOWHERE = torch.iinfo(torch.int64).max


def _best(
    tensor: Tensor, dims: Sequence[int], reduce_op: str, *, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Return extreme values and their first places, which count over all of ``dims``."""
    source = reduced(ascending(tensor, dims))
    axes = cut_axes(source, dims)
    own = source.spec
    lead = math.prod(own.mesh.shape[axis] for axis in axes)
    dtypes = (own.dtype, torch.int64)
    stacks = [
        reduced_spec(source, dims, Shard(0), keepdim=False, dtype=dtype, lead=lead)
        for dtype in dtypes
    ]

    def name(local: Tensor) -> list[Tensor]:
        offsets = own.box.offsets if own.box else (0,) * own.ndim
        return [part.unsqueeze(0) for part in _of_part(local, dims, reduce_op, offsets, own.shape)]

    values, places = (replicated(stack, axes) for stack in on_locals(name, [source], stacks))
    results = [
        reduced_spec(source, dims, Replicate(), keepdim=keepdim, dtype=dtype) for dtype in dtypes
    ]

    def pick(values: Tensor, places: Tensor) -> list[Tensor]:
        best = values.amax(0) if reduce_op == "max" else values.amin(0)
        hits = (values == best) | (values != values)  # that which is not a number goes first
        first = torch.where(hits, places, _NOWHERE).amin(0)
        return [best.reshape(results[0].local_shape), first.reshape(results[1].local_shape)]

    best, first = on_locals(pick, [values, places], results)
    return best, first


def _of_part(
    local: Tensor, dims: Sequence[int], reduce_op: str, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the best of a part, which starts at ``offsets`` of ``shape``, and where it is."""
    kept = [size for d, size in enumerate(local.shape) if d not in dims]
    if any(local.shape[d] == 0 for d in dims):
        nothing = local.new_full(kept, _identity(reduce_op, local.dtype))
        return nothing, local.new_full(kept, _NOWHERE, dtype=torch.int64)
    if len(dims) == 1:
        found = local.max(dims[0]) if reduce_op == "max" else local.min(dims[0])
        return found[0], found[1] + offsets[dims[0]]
    found = local.reshape(-1).max(0) if reduce_op == "max" else local.reshape(-1).min(0)
    place, rest = torch.zeros_like(found[1]), found[1]
    for d in reversed(range(local.ndim)):
        here = rest % local.shape[d] + offsets[d]
        place = place + here * math.prod(shape[d + 1 :])
        rest = rest // local.shape[d]
    return found[0], place


def _with_place(reduce_op: str) -> Decomposition:
    def run(tensor: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        dims = dims_of(tensor, dim)
        if not is_cut(tensor, dims) or 0 in tensor.shape:
            return NotImplemented
        return _best(tensor, dims, reduce_op, keepdim=keepdim)

    return run


def _place_only(reduce_op: str) -> Decomposition:
    both = _with_place(reduce_op)

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.bool:  # of which kernels name no place
            return NotImplemented
        found = both(tensor, *args, **kwargs)
        return found if found is NotImplemented else found[1]

    return run


for _reduce_op, _pair, _place in (
    ("max", aten.max.dim, aten.argmax.default),
    ("min", aten.min.dim, aten.argmin.default),
):
    decomposition(_pair)(_with_place(_reduce_op))
    decomposition(_place)(_place_only(_reduce_op))


@decomposition(aten.aminmax.default)
def aminmax(tensor: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return smallest and largest."""
    dims = dims_of(tensor, dim)
    if not is_cut(tensor, dims):
        return NotImplemented
    return tensor.amin(dims, keepdim), tensor.amax(dims, keepdim)


@decomposition(aten._foreach_max.default)
def foreach_max(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest element of every tensor."""
    return [tensor.max() for tensor in tensors]
