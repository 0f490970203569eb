"""Norms of tensors, those of the parts combined, and weights of a given norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import Partial
from ..tensor.wrapper import Wrapper
from .engine.dims import dims_of, only
from .engine.dtypes import accumulator, is_inexact
from .engine.factors import FIRST
from .engine.forms import operators
from .engine.local_kernels import zeros_if_some_empty
from .engine.primitives import (
    cut_axes,
    on_locals,
    reduced,
    reduced_spec,
    reduced_sum,
    with_replicas,
)
from .engine.rules import alike, over_whole_dims
from .engine.table import OpCall, Rule, decomposition, meta, rule

aten = torch.ops.aten

rule(aten.linalg__powsum.default, aten.linalg_vector_norm.default)(over_whole_dims)


@meta(aten.linalg_vector_norm.default)
def vector_norm_meta(
    tensor: Tensor, ord: float = 2, dim: Sequence[int] | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Return the norm; of no elements also where it needs some, if those dims have them."""
    reduces_some = all(tensor.shape[d] for d in dims_of(tensor, dim))
    run = aten.linalg_vector_norm.default
    return run(tensor, 2 if reduces_some else ord, dim, *args, **kwargs)


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(
    tensor: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the norm over some dims: local norms, one reduction of their powers, one root."""
    dims = dims_of(tensor, dim)
    result = tensor.dtype if dtype is None else dtype
    has_some = all(tensor.shape[d] for d in dims)  # not all norms are defined of nothing
    if not has_some or not cut_axes(tensor, dims) or not is_inexact(result):
        return NotImplemented
    source = reduced(tensor.to(accumulator(result)))
    if abs(ord) == float("inf"):
        values = source.abs()
        extreme = values.amax(dims, keepdim) if ord > 0 else values.amin(dims, keepdim)
        return extreme.to(result.to_real())
    total = _powers(source, ord, dims, keepdim)
    root = total if ord in (0, 1) else total.sqrt() if ord == 2 else total.pow(1 / ord)
    return root.to(result.to_real())


def _powers(source: Wrapper, ord: float, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return the sum of the powers of all values, from the norms of the parts."""
    out = reduced_spec(source, dims, Partial(), keepdim=keepdim, dtype=source.dtype.to_real())

    def powers(local: Tensor) -> list[Tensor]:
        if any(local.shape[d] == 0 for d in dims):
            return [local.new_zeros(out.local_shape, dtype=out.dtype)]
        norms = torch.linalg.vector_norm(local, ord, list(dims), keepdim)
        return [norms if ord in (0, 1) else norms.pow(ord)]

    return on_locals(powers, [source], [out])[0]


@decomposition(aten.linalg__powsum.default)
def powsum(
    tensor: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the sum of powers, which is a norm without its root."""
    dims = dims_of(tensor, dim)
    if not cut_axes(tensor, dims):
        return NotImplemented
    result = tensor.dtype if dtype is None else dtype
    source = reduced(tensor.to(accumulator(result)))
    return _powers(source, ord, dims, keepdim).to(result.to_real())


@decomposition(aten._foreach_powsum.Scalar)
def foreach_powsum(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the sum of powers of every tensor."""
    return [aten.linalg__powsum.default(tensor, ord, dtype=dtype) for tensor in tensors]


@decomposition(aten.dist.default)
def dist(tensor: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Return the norm of a difference."""
    return torch.linalg.vector_norm(tensor - other, p)


@decomposition(
    *operators(aten, "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype")
)
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


@rule(aten.renorm.default)
def renorm_rule(call: OpCall) -> Rule:
    """Rows of limited norm: each lies across all dims but one."""
    return alike(call, only(call.specs[0].ndim, call.arg("dim")))


@rule(aten._weight_norm_interface.default)
def weight_norm_rule(call: OpCall) -> Rule:
    """Values of a given norm along one dim, which passes through."""
    return alike(call, only(call.specs[0].ndim, call.arg("dim")), local=zeros_if_some_empty)


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward_rule(call: OpCall) -> Rule:
    """Its gradients."""
    dims = only(call.specs[0].ndim, call.arg("dim"))
    return alike(call, dims, linear=FIRST, local=zeros_if_some_empty)


@decomposition(aten._weight_norm_interface.default)
def weight_norm(values: Tensor, sizes: Tensor, dim: int = 0) -> Any:
    """Return values of the wanted size along one dim, and the size that they had."""
    others = _others(values, dim)
    if not (cut_axes(values, others) or cut_axes(sizes, others)):
        return NotImplemented
    norms = torch.linalg.vector_norm(values, 2, others, keepdim=True)
    return values * (sizes / norms), norms


@decomposition(aten._weight_norm_interface_backward.default)
@with_replicas
def weight_norm_backward(
    grad: Tensor, values: Tensor, sizes: Tensor, norms: Tensor, dim: int
) -> Any:
    """Return the gradients of the values and of the sizes."""
    others = _others(values, dim)
    if not any(cut_axes(t, others) for t in (grad, values)):
        return NotImplemented
    along = reduced_sum(grad * values, others) / norms
    return (grad - values * (along / norms)) * (sizes / norms), along


def _others(tensor: Tensor, dim: int) -> tuple[int, ...]:
    (own,) = dims_of(tensor, dim)
    return tuple(d for d in range(tensor.ndim) if d != own)
