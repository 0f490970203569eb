"""Activations that are more than pointwise: gated ones, and those with random slopes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .engine.rules import along_whole_dims
from .engine.table import decomposition, rule
from .pointwise import pointwise_rule
from .random import refuse_generator, without_terms

aten = torch.ops.aten


rule(
    aten.glu.default, aten.glu_backward.default, aten.glu_jvp.default, aten.glu_backward_jvp.default
)(along_whole_dims)

rule(aten.rrelu_with_noise_backward.default)(pointwise_rule)


@decomposition(aten.rrelu_with_noise.default)
def rrelu_with_noise(tensor: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return negative elements times a slope, others as they are; ``noise`` becomes the slopes."""
    result, slopes = rrelu_with_noise_functional(tensor, noise, *args, **kwargs)
    noise.copy_(slopes)
    return result.contiguous()  # as kernels lay them, whatever the order of the input


@decomposition(aten.rrelu_with_noise_.default)
def rrelu_with_noise_in_place(tensor: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Multiply negative elements by a slope; ``noise`` becomes the slopes."""
    return tensor.copy_(rrelu_with_noise(tensor, noise, *args, **kwargs))


@decomposition(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise_functional(
    tensor: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return negative elements times a slope, random in training, and the slopes."""
    refuse_generator(aten.rrelu_with_noise.default, generator)
    if not training:
        return torch.nn.functional.leaky_relu(tensor, (lower + upper) / 2), noise
    tensor = without_terms(tensor)
    slopes = torch.rand_like(tensor).mul_(upper - lower).add_(lower)
    slopes = torch.where(tensor <= 0, slopes, 1)
    return tensor * slopes, slopes


@decomposition(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(
    grad: Tensor,
    tensor: Tensor,
    noise: Tensor,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Tensor:
    """Return the gradient: that of the slopes that were drawn, or of the one in the middle."""
    if training and upper - lower > 1e-6:
        return grad * noise
    slope = (lower + upper) / 2
    return aten.leaky_relu_backward(grad, tensor, slope, self_is_result)
