"""Reductions: an axis that splits a reduced dim leaves a Partial result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..schemas import base_name, is_default_overload
from .factors import LINEAR_OPS, Dim, Factors
from .local import identity_of
from .table import LocalCall, LocalMaker, OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def sums(call: OpCall) -> Rule:
    """Sum and mean: linear; a mean divides its local sum by the global count."""
    dims = _reduced_dims(call, _dim_argument(call))
    is_mean = base_name(call.op) == "mean"
    return _reduction(call, dims, "sum", linear=True, local=_local_mean(dims) if is_mean else None)


@rule(aten.prod.default, aten.prod.dim_int)
def products(call: OpCall) -> Rule:
    """Product over all dims or one."""
    return _reduction(call, _reduced_dims(call, _dim_argument(call)), "product")


@rule(aten.amax.default, aten.amin.default)
def extremes(call: OpCall) -> Rule:
    """Largest and smallest over some dims; an empty shard gives the identity."""
    reduce_op = "max" if base_name(call.op) == "amax" else "min"
    dims = _reduced_dims(call, call.arg(1, "dim", ()))
    return _reduction(call, dims, reduce_op, local=_or_identity(reduce_op))


@rule(aten.max.default, aten.min.default)
def whole_extremes(call: OpCall) -> Rule:
    """Largest and smallest of all elements."""
    reduce_op = base_name(call.op)
    return _reduction(call, _reduced_dims(call, ()), reduce_op, local=_or_identity(reduce_op))


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def disjunctions(call: OpCall) -> Rule:
    """Whether any element is true."""
    return _reduction(call, _reduced_dims(call, _dim_argument(call)), "max")


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def conjunctions(call: OpCall) -> Rule:
    """Whether all elements are true."""
    return _reduction(call, _reduced_dims(call, _dim_argument(call)), "min")


@rule(aten.linalg_vector_norm.default)
def norms(call: OpCall) -> Rule:
    """Norms over whole dims; those over others are split into sums (``decompositions.norms``)."""
    dims = _reduced_dims(call, call.arg(2, "dim"))
    first = call.outputs[0]
    ndim = call.specs[0].ndim
    keeps_dims = first is not None and len(first.shape) == ndim
    kept = tuple(None if i in dims else Dim(i) for i in range(ndim))
    out = kept if keeps_dims else tuple(dim for dim in kept if dim is not None)
    return Rule(rows=Factors(call=call, inputs=(kept,), outputs=(out,)))


@rule(
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.sort.default,
    aten.topk.default,
)
def along_one_dim(call: OpCall) -> Rule:
    """Operators that need one dim whole, which the result keeps, drops or resizes."""
    ndim, position = call.specs[0].ndim, 1
    if base_name(call.op) == "topk":
        position = 2
    default = -1 if base_name(call.op) in ("sort", "topk") else None
    dim = call.arg(position, "dim", default)
    whole = set(range(ndim)) if dim is None else {dim % max(ndim, 1)}
    kept = [None if i in whole else Dim(i) for i in range(ndim)]
    first = call.outputs[0]
    if first is not None and len(first.shape) != ndim:
        outputs = [d for d in kept if d is not None]
    else:
        outputs = kept
    return Rule(
        rows=Factors(
            call=call, inputs=(tuple(kept),), outputs=(tuple(outputs),) * len(call.outputs)
        )
    )


def _reduction(
    call: OpCall,
    dims: frozenset[int],
    reduce_op: str,
    *,
    linear: bool = False,
    local: LocalMaker | None = None,
) -> Rule:
    source = call.specs[0]
    first = call.outputs[0]
    keeps_dims = first is not None and len(first.shape) == source.ndim
    kept = [None if i in dims else Dim(i) for i in range(source.ndim)]
    outputs = kept if keeps_dims else [dim for dim in kept if dim is not None]
    return Rule(
        rows=Factors(
            call=call,
            inputs=(tuple(Dim(i) for i in range(source.ndim)),),
            outputs=(tuple(outputs),),
            reduce=dict.fromkeys(dims, reduce_op),
            linear=(frozenset({0}),) if linear else (),
            linear_ops=LINEAR_OPS if linear else (reduce_op,),
        ),
        local=local,
    )


def _dim_argument(call: OpCall) -> Sequence[int] | int | None:
    return None if is_default_overload(call.op) else call.arg(1, "dim")


def _reduced_dims(call: OpCall, dim: Sequence[int] | int | None) -> frozenset[int]:
    ndim = call.specs[0].ndim
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return frozenset(range(ndim))
    dims = [dim] if isinstance(dim, int) else dim
    return frozenset(d % max(ndim, 1) for d in dims)


def _local_mean(dims: frozenset[int]) -> LocalMaker:
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        source = local.inputs[0]
        if not any(source.layout.splits[dim] for dim in dims):
            return None
        count = math.prod(source.shape[dim] for dim in dims)
        dtype = local.outputs[0].dtype if local.outputs[0] else source.dtype
        keepdim = local.outputs[0] is not None and local.outputs[0].ndim == source.ndim
        reduced = sorted(dims)
        # A sum in half precision may overflow where the mean does not.
        low = dtype.is_floating_point and dtype.itemsize < 4
        accumulator = torch.float32 if low else dtype

        def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
            total = tensor.sum(reduced, keepdim=keepdim, dtype=accumulator)
            return total.div_(count).to(dtype)

        return run

    return maker


def _or_identity(reduce_op: str) -> LocalMaker:
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        source = local.inputs[0]
        if 0 not in source.local_shape or 0 in source.shape:
            return None
        shape, identity = local.output_shape, identity_of(reduce_op, source.dtype)

        def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
            return tensor.new_full(shape, identity)

        return run

    return maker
