"""Layer norm and RMS norm: the leading dims pass through.

Where the mesh cuts what is normalised, small sums are reduced and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .engine.dims import leading
from .engine.dtypes import accumulator
from .engine.factors import Factors
from .engine.kernel_dtypes import dtypes_by_kernel, kernel_dtypes
from .engine.primitives import cut_axes, reduced, reduced_sum, with_replicas
from .engine.table import OpCall, Rule, decomposition, rule
from .variance import moments

aten = torch.ops.aten


dtypes_by_kernel(aten.native_layer_norm.default, aten.native_layer_norm_backward.default)


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def norm_rule(call: OpCall) -> Rule:
    """Values over the last dims, and what there is one of for all of these (means, roots)."""
    ndim = call.specs[0].ndim
    dims = leading(ndim, ndim - len(call.arg("normalized_shape")))
    weights = tuple((None,) * spec.ndim for spec in call.specs[1:])
    outputs = (dims,) * len(call.outputs)
    return Factors(call, (dims, *weights), outputs)


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def norm_backward_rule(call: OpCall) -> Rule:
    """Their gradients: those of weight and bias sum over the leading dims."""
    ndim, normalised = call.specs[0].ndim, len(call.arg("normalized_shape"))
    lead = ndim - normalised
    num_values = 4 if call.op is aten.native_layer_norm_backward.default else 3
    dims, whole = leading(ndim, lead), (None,) * normalised
    weights = (whole,) * (len(call.specs) - num_values)
    return Factors(
        call,
        inputs=(*(dims,) * num_values, *weights),
        outputs=(dims, *(whole,) * (len(call.outputs) - 1)),
        reduce=dict.fromkeys(range(lead), "sum"),
    )


def _last_dims(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(tensor.ndim - len(shape), tensor.ndim))


@decomposition(aten.native_layer_norm.default)
def layer_norm(
    tensor: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    """Return the normalised values, means and inverse deviations."""
    dims = _last_dims(tensor, shape)
    if not cut_axes(tensor, dims):
        return NotImplemented
    found = kernel_dtypes(
        aten.native_layer_norm.default, (tensor, shape, weight, bias, eps), {}, tensor.device.type
    )
    mean, total, count = moments(tensor, dims, keepdim=True)
    scale = (reduced(total) / count + eps).rsqrt()
    values = (tensor.to(mean.dtype) - mean) * scale
    if weight is not None:
        values = values * weight
    if bias is not None:
        values = values + bias
    kept = found[1] if found else mean.dtype
    # Kernels lay values in rows, whatever the order of the input.
    return values.to(tensor.dtype).contiguous(), mean.to(kept), scale.to(kept)


@decomposition(aten.native_layer_norm_backward.default)
@with_replicas
def layer_norm_backward(
    grad: Tensor,
    tensor: Tensor,
    shape: Sequence[int],
    mean: Tensor | None,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input, of the weight and of the bias; RMS norm has no mean."""
    dims = _last_dims(tensor, shape)
    if not (cut_axes(tensor, dims) or cut_axes(grad, dims)):
        return NotImplemented
    wide = accumulator(tensor.dtype)
    given, lead = reduced(grad.to(wide)), tuple(range(tensor.ndim - len(dims)))
    normal = (tensor.to(wide) if mean is None else tensor.to(wide) - mean) * scale
    inner = given if weight is None else given * weight
    grads: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        shared = normal * reduced_sum(inner * normal, dims)
        if mean is not None:
            shared = reduced_sum(inner, dims) + shared
        grads[0] = ((inner - shared / math.prod(shape)) * scale).to(tensor.dtype)
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
    scale = (reduced_sum(values * values, dims) / math.prod(shape) + small).rsqrt()
    values = values * scale
    return (values if weight is None else values * weight).to(tensor.dtype), scale


@decomposition(aten._fused_rms_norm_backward.default)
@with_replicas
def rms_norm_backward(
    grad: Tensor,
    tensor: Tensor,
    shape: Sequence[int],
    scale: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input and of the weight."""
    mask = (*output_mask, False)
    found = layer_norm_backward(grad, tensor, shape, None, scale, weight, None, mask)
    return found if found is NotImplemented else found[:2]
