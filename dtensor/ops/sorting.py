"""Sorts, order statistics, searches and sets: what is sorted must be whole along its dim.

Places in sorted rows are found in their parts, and add up.
"""

from __future__ import annotations

import torch

from ..mesh.spec import DTensorSpec
from .engine.dims import all_dims
from .engine.factors import Dim, Dims, Factors
from .engine.forms import operators
from .engine.gathered import on_gathered
from .engine.rules import along_whole_dims, over_whole_dims
from .engine.table import OpCall, Rule, rule
from .pointwise import pointwise_rule

aten = torch.ops.aten


rule(aten.sort.default, aten.sort.stable, aten.topk.default)(along_whole_dims)

rule(*operators(aten, "kthvalue median median.dim mode nanmedian nanmedian.dim"))(over_whole_dims)


@rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted_rule(call: OpCall) -> Rule | None:
    """Places in sorted rows: the places within the parts of a row add up."""
    row, given = call.args[0], call.args[1]
    if not isinstance(row, DTensorSpec):
        return None
    out = all_dims(len(call.output_shape))
    step = Dim(len(out))
    rows: Dims = (step,) if row.ndim == 1 else (*out[:-1], step)
    inputs = [rows, out] if isinstance(given, DTensorSpec) else [rows]
    if call.kwargs.get("sorter") is not None:  # names elements of the whole row
        rows = (*rows[:-1], None)
        inputs = [rows, *inputs[1:], rows]
    return Factors(call, tuple(inputs), (out,), reduce={step.factor: "sum"})


@rule(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize_rule(call: OpCall) -> Rule:
    """Places between sorted boundaries, in which the places within their parts add up."""
    out = all_dims(len(call.output_shape))
    step = Dim(len(out))
    inputs = (out, (step,)) if isinstance(call.args[0], DTensorSpec) else ((step,),)
    return Factors(call, inputs, (out,), reduce={step.factor: "sum"})


rule(aten.isin.Tensor_Scalar)(pointwise_rule)


@rule(aten.isin.Tensor_Tensor, aten.isin.Scalar_Tensor)
def isin_rule(call: OpCall) -> Rule:
    """Whether elements are among others: those are in one part of them or in none."""
    out = all_dims(len(call.output_shape))
    others = call.specs[-1]
    steps: Dims = tuple(Dim(len(out) + i) for i in range(others.ndim))
    inverts = bool(call.arg("invert"))
    inputs = (out, steps) if isinstance(call.args[0], DTensorSpec) else (steps,)
    factors = range(len(out), len(out) + others.ndim)
    reduce = dict.fromkeys(factors, "min" if inverts else "max")
    return Factors(call, inputs, (out,), reduce=reduce)


on_gathered(
    *operators(aten, "_unique _unique2 unique_consecutive unique_dim unique_dim_consecutive")
)
