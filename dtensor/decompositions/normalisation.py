"""Layer norm and its kin where the mesh cuts what is normalised: small reductions only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .moments import moments
from .pieces import accumulator, cut_axes, dims_of, reduced
from .table import decomposition

aten = torch.ops.aten


def _last_dims(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(tensor.ndim - len(shape), tensor.ndim))


def _total(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the sum over some dims, which are kept, on all ranks that have terms of it."""
    return reduced(tensor.sum(dims, keepdim=True))


@decomposition(aten.native_layer_norm.default)
def layer_norm(
    tensor: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    """Return the normalised values, means and inverse deviations."""
    dims = _last_dims(tensor, shape)
    if not cut_axes(tensor, dims):
        return NotImplemented
    mean, total, count = moments(tensor, dims, keepdim=True)
    scale = (reduced(total) / count + eps).rsqrt()
    values = (tensor.to(mean.dtype) - mean) * scale
    if weight is not None:
        values = values * weight
    if bias is not None:
        values = values + bias
    return values.to(tensor.dtype), mean, scale


@decomposition(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad: Tensor,
    tensor: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input, of the weight and of the bias."""
    dims = _last_dims(tensor, shape)
    if not (cut_axes(tensor, dims) or cut_axes(grad, dims)):
        return NotImplemented
    wide = accumulator(tensor.dtype)
    given, lead = reduced(grad.to(wide)), tuple(range(tensor.ndim - len(dims)))
    normal = (tensor.to(wide) - mean) * scale
    inner = given if weight is None else given * weight
    count = math.prod(shape)
    grads: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        shared = _total(inner, dims) + normal * _total(inner * normal, dims)
        grads[0] = ((inner - shared / count) * scale).to(tensor.dtype)
    if output_mask[1] and weight is not None:
        grads[1] = _over(given * normal, lead).to(weight.dtype)
    if output_mask[2] and bias is not None:
        grads[2] = _over(given, lead).to(bias.dtype)
    return tuple(grads)


def _over(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor


@decomposition(aten._fused_rms_norm.default)
def rms_norm(tensor: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    """Return the values over their root mean square, and its inverse."""
    dims = _last_dims(tensor, shape)
    if not cut_axes(tensor, dims):
        return NotImplemented
    values = reduced(tensor.to(accumulator(tensor.dtype)))
    small = torch.finfo(values.dtype).eps if eps is None else eps
    scale = (_total(values * values, dims) / math.prod(shape) + small).rsqrt()
    values = values * scale
    return (values if weight is None else values * weight).to(tensor.dtype), scale


@decomposition(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    grad: Tensor,
    tensor: Tensor,
    shape: Sequence[int],
    scale: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input and of the weight."""
    dims = _last_dims(tensor, shape)
    if not (cut_axes(tensor, dims) or cut_axes(grad, dims)):
        return NotImplemented
    wide = accumulator(tensor.dtype)
    given, lead = reduced(grad.to(wide)), tuple(range(tensor.ndim - len(dims)))
    normal = tensor.to(wide) * scale
    inner = given if weight is None else given * weight
    grads: list[Tensor | None] = [None, None]
    if output_mask[0]:
        shared = normal * _total(inner * normal, dims) / math.prod(shape)
        grads[0] = ((inner - shared) * scale).to(tensor.dtype)
    if output_mask[1] and weight is not None:
        grads[1] = _over(given * normal, lead).to(weight.dtype)
    return tuple(grads)


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
    along = _total(grad * values, others) / norms
    return (grad - values * (along / norms)) * (sizes / norms), along


def _others(tensor: Tensor, dim: int) -> tuple[int, ...]:
    (own,) = dims_of(tensor, dim)
    return tuple(d for d in range(tensor.ndim) if d != own)
