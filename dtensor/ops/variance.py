"""Variances: every rank reduces its part, and what the ranks combine is as small as the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import Partial
from .engine.dims import dims_of
from .engine.dtypes import accumulator, is_inexact
from .engine.forms import operators
from .engine.primitives import cut_axes, on_locals, reduced, reduced_spec, replicated
from .engine.rules import over_whole_dims
from .engine.table import Decomposition, OpCall, Rule, decomposition, rule

aten, prims = torch.ops.aten, torch.ops.prims


@rule(
    *operators(aten, "std.correction std_mean.correction var.correction var_mean.correction"),
    *operators(prims, "var"),
)
def variance_rule(call: OpCall) -> Rule:
    """Variances over dims that must be whole, of what has fractions."""
    _require_fractions(call.specs[0].dtype)
    return over_whole_dims(call)


def _require_fractions(dtype: torch.dtype) -> None:
    """Raise what kernels raise for integers, on ranks without elements, too."""
    if not is_inexact(dtype):
        torch.var(torch.ones(1, dtype=dtype), correction=0)


def moments(tensor: Tensor, dims: Sequence[int], *, keepdim: bool) -> tuple[Tensor, Tensor, int]:
    """Return means, sums of squared deviations, and the number of elements of each.

    Half precision gives single. The sums are Partial along the axes that cut ``dims``.
    """
    source = reduced(tensor.to(accumulator(tensor.dtype)))
    axes = cut_axes(source, dims)
    count = math.prod(source.shape[d] for d in dims)
    partial = Partial("sum")
    wide = reduced_spec(source, dims, partial, keepdim=True, dtype=source.dtype)
    real = source.dtype.to_real()

    def means(local: Tensor) -> list[Tensor]:
        return [local.sum(list(dims), keepdim=True) / count]

    (mean,) = on_locals(means, [source], [wide])
    mean = replicated(mean, axes)
    squares = reduced_spec(source, dims, partial, keepdim=keepdim, dtype=real)

    def deviations(local: Tensor, mean: Tensor) -> list[Tensor]:
        away = local - mean
        terms = away.abs().square() if away.is_complex() else away.square_()
        return [terms.sum(list(dims), keepdim=keepdim)]

    (total,) = on_locals(deviations, [source, mean], [squares])
    if not keepdim:
        mean = mean.reshape(total.shape)
    return mean, total, count


def _variance(*, takes_root: bool, with_mean: bool) -> Decomposition:
    """Return the variance, or its root, over dims that the mesh cuts, and the mean beside it."""

    def run(
        tensor: Tensor,
        dim: Sequence[int] | None = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> Any:
        dims = dims_of(tensor, dim)
        _require_fractions(tensor.dtype)
        if not cut_axes(tensor, dims):
            return NotImplemented
        mean, total, count = moments(tensor, dims, keepdim=keepdim)
        # In this order 0 is left of not-a-number, as kernels have it.
        free = max(0, count - (1 if correction is None else correction)) if count else 0
        # Nothing over nothing is not a number, and must not be a term of one.
        found = (total if free else reduced(total)) / float(free)
        found = (found.sqrt() if takes_root else found).to(tensor.dtype.to_real())
        return (found, mean.to(tensor.dtype)) if with_mean else found

    return run


decomposition(aten.var.correction)(_variance(takes_root=False, with_mean=False))
decomposition(aten.std.correction)(_variance(takes_root=True, with_mean=False))
decomposition(aten.var_mean.correction)(_variance(takes_root=False, with_mean=True))
decomposition(aten.std_mean.correction)(_variance(takes_root=True, with_mean=True))
