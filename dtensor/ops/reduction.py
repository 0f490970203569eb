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

from .engine.dims import dims_of
from .engine.dtypes import accumulator, is_inexact, is_low
from .engine.gathered import on_gathered
from .engine.primitives import cut_axes, has_terms
from .engine.rules import named_dims, over_whole_dims, reducing
from .engine.table import Decomposition, LocalCall, OpCall, Rule, decomposition, meta, rule

aten, prims = torch.ops.aten, torch.ops.prims


@rule(aten.sum.default, aten.sum.dim_IntList, prims.sum.default)
def sum_rule(call: OpCall) -> Rule:
    """Sum over all dims or some."""
    return reducing(call, "sum")


@rule(aten.mean.default, aten.mean.dim)
def mean_rule(call: OpCall) -> Rule:
    """Mean: each rank divides its sum by the global count, and the shares add up."""
    return reducing(call, "sum", local=_local_mean)


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


@rule(aten.prod.default, aten.prod.dim_int, prims.prod.default)
def prod_rule(call: OpCall) -> Rule:
    """Product over all dims or one."""
    return reducing(call, "product")


@rule(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)
def any_rule(call: OpCall) -> Rule:
    """Whether any element is true."""
    return reducing(call, "max", linear=_is_bool(call))


@rule(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)
def all_rule(call: OpCall) -> Rule:
    """Whether all elements are true."""
    return reducing(call, "min", linear=_is_bool(call))


def _is_bool(call: OpCall) -> bool:
    """Whether a maximum of the elements says what is true; of numbers it does not."""
    return call.specs[0].dtype == torch.bool


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, aten.nansum.default)
def terms_rule(call: OpCall) -> Rule:
    """What is not zero, counted, and what is a number, added up.

    Not linear: a term of an element is another number than the element.
    """
    return reducing(call, "sum", linear=False)


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
    tensor: Tensor,
    other: Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    """Return whether all elements are close, on every rank."""
    return bool(torch.isclose(tensor, other, rtol, atol, equal_nan).all().item())


on_gathered(aten.segment_reduce.default, aten._segment_reduce_backward.default)
