"""Weights of a given norm along one dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .engine.dims import dims_of, only
from .engine.factors import FIRST
from .engine.local_kernels import zeros_if_some_empty
from .engine.primitives import cut_axes, reduced_sum
from .engine.rules import alike
from .engine.table import OpCall, Rule, decomposition, rule

aten = torch.ops.aten


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
