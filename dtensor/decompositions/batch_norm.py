"""Batch norm over all ranks, in terms of sums over what they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .moments import moments
from .pieces import accumulator, reduced
from .table import decomposition

aten = torch.ops.aten


def _dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims that the values of a channel lie along."""
    return tuple(d for d in range(tensor.ndim) if d != 1)


def _along_channels(channels: Tensor, tensor: Tensor) -> Tensor:
    """Return one value per channel in a shape that broadcasts to ``tensor``."""
    return channels.reshape([1 if d != 1 else -1 for d in range(tensor.ndim)])


def _normalised(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor
) -> Tensor:
    values = tensor.to(accumulator(tensor.dtype)) - _along_channels(mean, tensor)
    values = values * _along_channels(scale if weight is None else scale * weight, tensor)
    if bias is not None:
        values = values + _along_channels(bias, tensor)
    return values.to(tensor.dtype)


def _statistics(tensor: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and inverse deviation per channel, and the variance that is kept of them."""
    mean, total, count = moments(tensor, _dims(tensor), keepdim=False)
    total = reduced(total)
    return mean, (total / count + eps).rsqrt(), total / (count - 1)


def _keep(running: Tensor, value: Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


@decomposition(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return values, and mean and inverse deviation per channel; updates what is running."""
    if not training and running_mean is not None and running_var is not None:
        wide = accumulator(tensor.dtype)
        scale = (running_var.to(wide) + eps).rsqrt()
        empty = tensor.new_empty([0], dtype=wide)
        values = _normalised(tensor, weight, bias, running_mean.to(wide), scale)
        return values, empty, empty.clone()
    mean, scale, var = _statistics(tensor, eps)
    if running_mean is not None:
        _keep(running_mean, mean, momentum)
    if running_var is not None:
        _keep(running_var, var, momentum)
    return _normalised(tensor, weight, bias, mean, scale), mean, scale


@decomposition(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_stats(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return what ``batch_norm`` does, where nothing is running."""
    return batch_norm(tensor, weight, bias, None, None, training, momentum, eps)


@decomposition(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """Return what ``batch_norm`` does outside of training."""
    return batch_norm(tensor, weight, bias, running_mean, running_var, False, momentum, eps)


@decomposition(aten._native_batch_norm_legit_functional.default)
def functional_batch_norm(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return what ``batch_norm`` does, and new running values."""
    kept = running_mean.clone(), running_var.clone()
    return *batch_norm(tensor, weight, bias, *kept, training, momentum, eps), *kept


@decomposition(aten._batch_norm_with_update.default)
def batch_norm_with_update(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """Return what ``batch_norm`` does in training, and no reserve."""
    found = batch_norm(tensor, weight, bias, running_mean, running_var, True, momentum, eps)
    return *found, _no_reserve(tensor)


@decomposition(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Any:
    """Return what ``batch_norm`` does outside of training, and no reserve."""
    found = batch_norm(tensor, weight, bias, running_mean, running_var, False, momentum, eps)
    return *found, _no_reserve(tensor)


@decomposition(aten.cudnn_batch_norm.default)
def cudnn_batch_norm(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return what ``batch_norm`` does, and no reserve."""
    found = batch_norm(tensor, weight, bias, running_mean, running_var, training, momentum, eps)
    return *found, _no_reserve(tensor)


def _no_reserve(tensor: Tensor) -> Tensor:
    return tensor.new_empty([0], dtype=torch.uint8)


@decomposition(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad: Tensor,
    tensor: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input, of the weight and of the bias."""
    wide, dims = accumulator(tensor.dtype), _dims(tensor)
    if not training and running_mean is not None and running_var is not None:
        mean, scale = running_mean.to(wide), (running_var.to(wide) + eps).rsqrt()
    if mean is None or scale is None:
        return NotImplemented
    given = reduced(grad.to(wide))
    normal = (tensor.to(wide) - _along_channels(mean, tensor)) * _along_channels(scale, tensor)
    grad_weight, grad_bias = reduced((given * normal).sum(dims)), reduced(given.sum(dims))
    grad_input = None
    if output_mask[0]:
        if training:
            count = math.prod(tensor.shape[d] for d in dims)
            shared = normal * _along_channels(grad_weight / count, tensor)
            given = given - shared - _along_channels(grad_bias / count, tensor)
        scaled = scale if weight is None else scale * weight
        grad_input = (given * _along_channels(scaled, tensor)).to(tensor.dtype)
    dtype = tensor.dtype if weight is None else weight.dtype
    return (
        grad_input,
        grad_weight.to(dtype) if output_mask[1] else None,
        grad_bias.to(dtype) if output_mask[2] else None,
    )


@decomposition(aten.batch_norm_backward.default)
def batch_norm_backward_with_reserve(
    grad: Tensor,
    tensor: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Tensor,
) -> Any:
    """Return the gradients of a batch norm that has a reserve."""
    del reserve
    running = running_mean, running_var
    return batch_norm_backward(
        grad, tensor, weight, *running, mean, scale, training, eps, output_mask
    )


@decomposition(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(
    tensor: Tensor,
    grad: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    eps: float,
    reserve: Tensor,
) -> Any:
    """Return the gradients of ``cudnn_batch_norm``, which has one in training only."""
    del reserve
    running, every = (running_mean, running_var), (True, True, True)
    return batch_norm_backward(grad, tensor, weight, *running, mean, scale, True, eps, every)
