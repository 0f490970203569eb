"""Scans, sorts and searches: one dim must be whole, the others pass through."""

# pyright: reportPrivateUsage=false
# The schema of an operator has no public name in torch.

from __future__ import annotations

import torch

from ..mesh.spec import DTensorSpec
from ..tensor.schemas import base_name
from ..torch_private import schema_of
from .engine.factors import Dim, Dims, Factors
from .engine.table import OpCall, Rule, rule

aten = torch.ops.aten


@rule(
    aten._logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.cumprod.default,
    aten.cumsum.default,
    aten.glu.default,
    aten.logcumsumexp.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
)
def along_one_dim(call: OpCall) -> Rule:
    """Operators along one dim, which the results keep or resize."""
    return _along(call, _dim_argument(call))


@rule(aten.glu_backward.default, aten.glu_jvp.default, aten.glu_backward_jvp.default)
def along_dim_of_all(call: OpCall) -> Rule:
    """Operators of several tensors along one dim of each."""
    return _along(call, _dim_argument(call))


def _along(call: OpCall, dim: int) -> Rule:
    ndim = call.specs[0].ndim
    dims: Dims = tuple(None if i == dim % ndim else Dim(i) for i in range(ndim)) if ndim else ()
    linear = (frozenset({0}),) if base_name(call.op) == "cumsum" else ()
    count, outputs = len(call.specs), len(call.outputs)
    return Rule(
        rows=Factors(call=call, inputs=(dims,) * count, outputs=(dims,) * outputs, linear=linear)
    )


def _dim_argument(call: OpCall) -> int:
    for position, argument in enumerate(schema_of(call.op).arguments):
        if argument.name == "dim":
            return call.arg(position, "dim", argument.default_value)
    return -1


@rule(aten.renorm.default)
def renormalised(call: OpCall) -> Rule:
    """Rows of limited norm: each lies across all dims but one."""
    ndim, dim = call.specs[0].ndim, call.args[2]
    dims: Dims = tuple(Dim(i) if i == dim % ndim else None for i in range(ndim))
    return Rule(rows=Factors(call=call, inputs=(dims,), outputs=(dims,)))


@rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searches(call: OpCall) -> Rule | None:
    """Places in sorted rows: the places within the parts of a row add up."""
    row, given = call.args[0], call.args[1]
    if not isinstance(row, DTensorSpec):
        return None
    first = call.outputs[0]
    out: Dims = tuple(Dim(i) for i in range(len(first.shape) if first else 0))
    step = Dim(len(out))
    rows: Dims = (step,) if row.ndim == 1 else (*out[:-1], step)
    inputs = [rows, out] if isinstance(given, DTensorSpec) else [rows]
    if call.kwargs.get("sorter") is not None:  # names elements of the whole row
        rows = (*rows[:-1], None)
        inputs = [rows, *inputs[1:], rows]
    return Rule(
        rows=Factors(call=call, inputs=tuple(inputs), outputs=(out,), reduce={step.factor: "sum"})
    )


@rule(aten.bucketize.Tensor, aten.bucketize.Scalar)
def buckets(call: OpCall) -> Rule:
    """Places between sorted boundaries, in which the places within their parts add up."""
    first = call.outputs[0]
    out: Dims = tuple(Dim(i) for i in range(len(first.shape) if first else 0))
    step = Dim(len(out))
    inputs = (out, (step,)) if isinstance(call.args[0], DTensorSpec) else ((step,),)
    return Rule(rows=Factors(call=call, inputs=inputs, outputs=(out,), reduce={step.factor: "sum"}))


@rule(aten.isin.Tensor_Tensor, aten.isin.Scalar_Tensor)
def memberships(call: OpCall) -> Rule:
    """Whether elements are among others: those are in one part of them or in none."""
    first = call.outputs[0]
    out: Dims = tuple(Dim(i) for i in range(len(first.shape) if first else 0))
    others = call.specs[-1]
    steps: Dims = tuple(Dim(len(out) + i) for i in range(others.ndim))
    inverts = bool(call.arg(3, "invert", False))
    inputs = (out, steps) if isinstance(call.args[0], DTensorSpec) else (steps,)
    factors = range(len(out), len(out) + others.ndim)
    reduce = dict.fromkeys(factors, "min" if inverts else "max")
    return Rule(rows=Factors(call=call, inputs=inputs, outputs=(out,), reduce=reduce))


@rule(aten.histc.default)
def histograms(call: OpCall) -> Rule:
    """Counts between given bounds add up; other bounds are those of all values."""
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    dims: Dims = tuple(Dim(i) if low != high else None for i in range(call.specs[0].ndim))
    return Rule(rows=Factors(call=call, inputs=(dims,), outputs=((None,),), reduce=_sums(dims)))


def _sums(dims: Dims) -> dict[int, str]:
    return {dim.factor: "sum" for dim in dims if dim is not None}
