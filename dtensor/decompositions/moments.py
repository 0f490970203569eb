"""Variances: every rank reduces its part, and what the ranks combine is as small as the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import Partial
from .pieces import accumulator, cut_axes, dims_of, on_locals, reduced, reduced_spec, replicated
from .table import decomposition

aten = torch.ops.aten


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


def _variance(
    tensor: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor] | None:
    """Return variance and mean over dims that the mesh cuts, or None where it cuts none."""
    dims = dims_of(tensor, dim)
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    if not cut_axes(tensor, dims) or not is_inexact:
        return None
    mean, total, count = moments(tensor, dims, keepdim=keepdim)
    free = max(count - (1 if correction is None else correction), 0)
    # Nothing over nothing is not a number, and must not be a term of one.
    return (total if free else reduced(total)) / float(free), mean


@decomposition(aten.var.correction)
def var(
    tensor: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Return the variance."""
    found = _variance(tensor, dim, correction, keepdim)
    return NotImplemented if found is None else found[0].to(tensor.dtype.to_real())


@decomposition(aten.std.correction)
def std(
    tensor: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Return the standard deviation."""
    found = _variance(tensor, dim, correction, keepdim)
    return NotImplemented if found is None else found[0].sqrt().to(tensor.dtype.to_real())


@decomposition(aten.var_mean.correction)
def var_mean(
    tensor: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Return variance and mean."""
    found = _variance(tensor, dim, correction, keepdim)
    if found is None:
        return NotImplemented
    return found[0].to(tensor.dtype.to_real()), found[1].to(tensor.dtype)


@decomposition(aten.std_mean.correction)
def std_mean(
    tensor: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Return standard deviation and mean."""
    found = _variance(tensor, dim, correction, keepdim)
    if found is None:
        return NotImplemented
    return found[0].sqrt().to(tensor.dtype.to_real()), found[1].to(tensor.dtype)
