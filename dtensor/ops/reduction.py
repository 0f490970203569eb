"""Sums, means, products, counts and truth: what an axis cuts leaves a Partial result.

In half precision the terms of the ranks meet in single precision: a rank's sum may overflow, and
would be rounded, where the sum over all ranks on one device is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.schemas import base_name
from .engine.dims import dims_of
from .engine.dtypes import accumulator, is_inexact, is_low
from .engine.forms import operators
from .engine.gathered import on_gathered
from .engine.primitives import cut_axes, has_terms
from .engine.rules import named_dims, over_whole_dims, reducing
from .engine.table import (
    Decomposition,
    LocalCall,
    OpCall,
    Rule,
    decomposition,
    in_any_order,
    meta,
    rule,
)

aten, prims = torch.ops.aten, torch.ops.prims


_REDUCE_OPS = {
    "_is_all_true": "min",
    "_is_any_true": "max",
    "all": "min",
    "any": "max",
    "count_nonzero": "sum",
    "nansum": "sum",
    "prod": "product",
    "sum": "sum",
}
"""By operator, what joins the results of parts."""


@rule(
    *operators(aten, "sum sum.dim_IntList prod prod.dim_int nansum"),
    *operators(aten, "any any.dim any.dims _is_any_true all all.dim all.dims _is_all_true"),
    *operators(aten, "count_nonzero count_nonzero.dim_IntList"),
    *operators(prims, "sum prod"),
)
def reduction_rule(call: OpCall) -> Rule:
    """A reduction over all dims or some."""
    name, dtype = base_name(call.op), call.specs[0].dtype
    # A maximum of numbers does not say what is true, and a term is another number than an element.
    linear = name in ("sum", "prod") or (_REDUCE_OPS[name] != "sum" and dtype == torch.bool)
    return reducing(call, _REDUCE_OPS[name], linear=linear)


@rule(aten.mean.default, aten.mean.dim)
def mean_rule(call: OpCall) -> Rule:
    """Mean: each rank divides its sum by the global count, and the shares add up."""
    return reducing(call, "sum", local=_local_mean)


@in_any_order
def _local_mean(local: LocalCall) -> Callable[..., Any] | None:
    source, output, dims = local.inputs[0], local.outputs[0], named_dims(local.call)
    if output is None or not any(source.layout.splits[dim] for dim in dims):
        return None
    count, keepdim = math.prod(source.shape[dim] for dim in dims), output.ndim == source.ndim

    def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        # A sum in half precision may overflow where the mean does not.
        total = tensor.sum(dims, keepdim=keepdim, dtype=accumulator(output.dtype))
        return total.div_(count).to(output.dtype)

    return run


@meta(aten.mean.default, aten.mean.dim)
def mean_meta(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the sum, which is as large, and sooner told."""
    same = aten.sum if is_inexact(tensor.dtype) else aten.mean
    return same(tensor, *args, **kwargs)


rule(aten.hash_tensor.default, prims.xor_sum.default)(over_whole_dims)


def _in_single(op: Any, *, over_dims: bool) -> Decomposition:
    """Return a reduction in half precision, whose parts are reduced in single precision."""

    def run(
        tensor: Tensor,
        dim: Sequence[int] | int | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        result = tensor.dtype if dtype is None else dtype
        if not is_low(result) or not (has_terms(tensor) or cut_axes(tensor, dims_of(tensor, dim))):
            return NotImplemented
        over = (dim, keepdim) if over_dims else ()
        return op(tensor, *over, dtype=torch.float32).to(result)

    return run


for _op in (aten.sum.default, aten.mean.default, aten.prod.default):
    decomposition(_op)(_in_single(_op, over_dims=False))

for _op in (aten.sum.dim_IntList, aten.mean.dim, aten.nansum.default, aten.prod.dim_int):
    decomposition(_op)(_in_single(_op, over_dims=True))


@decomposition(aten.allclose.default)
def allclose(
    tensor: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether all elements are close, on every rank."""
    return bool(torch.isclose(tensor, other, rtol, atol, equal_nan).all().item())


on_gathered(aten.segment_reduce.default, aten._segment_reduce_backward.default)
