"""Reductions: an axis that splits a reduced dim leaves a Partial result."""

# pyright: reportPrivateUsage=false
# The schema of an operator has no public name in torch.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.schemas import base_name, is_default_overload
from ..torch_private import schema_of
from .engine.factors import LINEAR_OPS, Dim, Factors
from .engine.local import identity_of
from .engine.table import LocalCall, LocalMaker, OpCall, Rule, rule

aten, prims = torch.ops.aten, torch.ops.prims

_FIRST = frozenset({0})


@rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def sums(call: OpCall) -> Rule:
    """Sum and mean: linear; a mean divides its local sum by the global count."""
    dims = _reduced_dims(call, _dim_argument(call))
    is_mean = base_name(call.op) == "mean"
    return _reduction(call, dims, "sum", local=_local_mean(dims) if is_mean else None)


@rule(aten.prod.default, aten.prod.dim_int)
def products(call: OpCall) -> Rule:
    """Product over all dims or one."""
    return _reduction(call, _reduced_dims(call, _dim_argument(call)), "product")


@rule(aten.amax.default, aten.amin.default)
def extremes(call: OpCall) -> Rule:
    """Largest and smallest over some dims; an empty shard gives the identity."""
    reduce_op = "max" if base_name(call.op) == "amax" else "min"
    dims = _reduced_dims(call, call.arg(1, "dim", ()))
    return _reduction(call, dims, reduce_op, local=_or_identity(reduce_op, dims))


@rule(aten.max.default, aten.min.default)
def whole_extremes(call: OpCall) -> Rule:
    """Largest and smallest of all elements."""
    reduce_op = base_name(call.op)
    if 0 in call.specs[0].shape:  # which the operator refuses with values only
        raise RuntimeError(f"{reduce_op}() of a tensor without elements ({call.specs[0]})")
    dims = _reduced_dims(call, ())
    return _reduction(call, dims, reduce_op, local=_or_identity(reduce_op, dims))


@rule(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)
def disjunctions(call: OpCall) -> Rule:
    """Whether any element is true."""
    return _reduction(call, _reduced_dims(call, _dim_argument(call)), "max", linear=_is_bool(call))


@rule(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)
def conjunctions(call: OpCall) -> Rule:
    """Whether all elements are true."""
    return _reduction(call, _reduced_dims(call, _dim_argument(call)), "min", linear=_is_bool(call))


def _is_bool(call: OpCall) -> bool:
    """Whether a maximum of the elements says what is true; of numbers it does not."""
    return call.specs[0].dtype == torch.bool


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def counts(call: OpCall) -> Rule:
    """How many elements are not zero: the counts of the parts add up."""
    return _reduction(call, _reduced_dims(call, call.arg(1, "dim")), "sum", linear=False)


@rule(aten.nansum.default)
def sums_of_numbers(call: OpCall) -> Rule:
    """Sum of what is a number; not linear, for a term may be none."""
    return _reduction(call, _reduced_dims(call, call.arg(1, "dim")), "sum", linear=False)


@rule(prims.sum.default, prims.prod.default, prims.amax.default, prims.amin.default)
def prims_reductions(call: OpCall) -> Rule:
    """Reductions that torch's decompositions are made of."""
    reduce_op = {"sum": "sum", "prod": "product", "amax": "max", "amin": "min"}[base_name(call.op)]
    dims = _reduced_dims(call, call.arg(1, "dims"))
    local = _or_identity(reduce_op, dims) if reduce_op in ("max", "min") else None
    return _reduction(call, dims, reduce_op, local=local)


@rule(aten.trace.default)
def traces(call: OpCall) -> Rule:
    """The sum of the diagonal, for which a matrix must be whole."""
    return Rule(rows=Factors(call=call, inputs=((None, None),), outputs=((),), linear=(_FIRST,)))


@rule(
    aten.argmax.default,
    aten.argmin.default,
    aten.aminmax.default,
    aten.hash_tensor.default,
    aten.kthvalue.default,
    aten.linalg__powsum.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.max.dim,
    aten.median.default,
    aten.median.dim,
    aten.min.dim,
    aten.mode.default,
    aten.nanmedian.default,
    aten.nanmedian.dim,
    aten.std.correction,
    aten.std_mean.correction,
    aten.var.correction,
    aten.var_mean.correction,
    prims.var.default,
    prims.xor_sum.default,
)
def over_whole_dims(call: OpCall) -> Rule:
    """Reductions for which a dim must be whole; most are split up if it is not (decompositions)."""
    return dropping(call, _reduced_dims(call, _named_dim(call)))


def dropping(call: OpCall, dims: frozenset[int]) -> Rule:
    """Return the rule of an operator with one input, of which some dims must be whole."""
    ndim = call.specs[0].ndim
    kept = tuple(None if i in dims else Dim(i) for i in range(ndim))
    left = tuple(dim for dim in kept if dim is not None)
    outputs = tuple(kept if meta and len(meta.shape) == ndim else left for meta in call.outputs)
    return Rule(rows=Factors(call=call, inputs=(kept,), outputs=outputs), local=_or_empty)


def _or_empty(local: LocalCall) -> Callable[..., Any] | None:
    """Return what makes results without elements, of which operators warn or raise."""
    outputs = [spec for spec in local.outputs if spec is not None]
    if not any(0 in spec.local_shape for spec in outputs):
        return None

    def run(tensor: Tensor, *_: Any, **__: Any) -> Any:
        made = [tensor.new_empty(spec.local_shape, dtype=spec.dtype) for spec in outputs]
        return made[0] if len(made) == 1 else tuple(made)

    return run


def _named_dim(call: OpCall) -> Sequence[int] | int | None:
    """Return the dims that an argument names, wherever the operator has it."""
    for position, argument in enumerate(schema_of(call.op).arguments):
        if argument.name in ("dim", "dims"):
            return call.arg(position, argument.name, argument.default_value)
    return None


def _reduction(
    call: OpCall,
    dims: frozenset[int],
    reduce_op: str,
    *,
    linear: bool = True,
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
            linear=(_FIRST,) if linear else (),
            linear_ops=LINEAR_OPS if reduce_op == "sum" else (reduce_op,),
        ),
        local=local,
    )


def _dim_argument(call: OpCall) -> Sequence[int] | int | None:
    return None if is_default_overload(call.op) else call.arg(1, "dim")


def _reduced_dims(call: OpCall, dim: Sequence[int] | int | None) -> frozenset[int]:
    ndim = call.specs[0].ndim
    if ndim == 0 or dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return frozenset(range(ndim))
    dims = [dim] if isinstance(dim, int) else dim
    return frozenset(d % ndim for d in dims)


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


def _or_identity(reduce_op: str, dims: frozenset[int]) -> LocalMaker:
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        source = local.inputs[0]
        if source.box is None or all(source.box.sizes[d] for d in dims):
            return None
        shape, identity = local.output_shape, identity_of(reduce_op, source.dtype)

        def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
            return tensor.new_full(shape, identity)

        return run

    return maker
