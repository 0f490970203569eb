"""Norms of sharded tensors, in terms of reductions that have rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .table import decomposition

aten = torch.ops.aten


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(
    tensor: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm over some dims: local powers, one reduction, one root."""
    result = tensor.dtype if dtype is None else dtype
    low = result.is_floating_point and result.itemsize < 4  # whose powers and sums overflow
    values = tensor.to(torch.float32 if low else result).abs()
    return _norm_of(values, ord, dim, keepdim).to(result)


def _norm_of(values: Tensor, ord: float, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    dims = list(range(values.ndim)) if dim is None else list(dim)
    if ord == 0:
        return (values != 0).to(values.dtype).sum(dims, keepdim)
    if ord == float("inf"):
        return values.amax(dims, keepdim)
    if ord == float("-inf"):
        return values.amin(dims, keepdim)
    if ord == 1:
        return values.sum(dims, keepdim)
    return values.pow(ord).sum(dims, keepdim).pow(1 / ord)


@decomposition(aten._foreach_norm.Scalar)
def foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the norm of every tensor."""
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


@decomposition(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm(
    tensor: Tensor,
    p: float | None = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm by the older operators, which know None for 2."""
    return torch.linalg.vector_norm(
        tensor, 2 if p is None else p, dim or None, keepdim, dtype=dtype
    )


@decomposition(aten.norm.ScalarOpt_dtype)
def norm_as(tensor: Tensor, p: float | None, *, dtype: torch.dtype) -> Tensor:
    """Return the norm over all dims in another dtype."""
    return norm(tensor, p, dtype=dtype)
