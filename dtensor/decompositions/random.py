"""Random operators made of others: those with tensors for a mean or a probability, and slopes."""

# pyright: reportPrivateUsage=false
# `_local_tensor` is a name that users of torch read; inside the package it is ours.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.random import refuse_generator
from ..tensor.wrapper import Wrapper
from .pieces import reduced
from .table import decomposition

aten = torch.ops.aten


@decomposition(aten.bernoulli.default)
def bernoulli(p: Tensor, *, generator: Any = None) -> Tensor:
    """Return 1 with the probability that each element names."""
    return _bernoulli(p, p, generator)


@decomposition(aten.bernoulli.Tensor)
def bernoulli_as(tensor: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    """Return 1 with probability ``p``, in the dtype of another tensor."""
    return _bernoulli(tensor, p, generator)


@decomposition(aten.bernoulli_.Tensor)
def bernoulli_in_place(tensor: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    """Write 1 with probability ``p``."""
    return tensor.copy_(_bernoulli(tensor, p, generator))


def _bernoulli(tensor: Tensor, p: Tensor, generator: Any) -> Tensor:
    refuse_generator(aten.bernoulli.Tensor, {"generator": generator})
    chance = torch.rand_like(tensor, dtype=torch.float64)
    p = _without_terms(p)
    local = _local(p)
    if not ((local >= 0) & (local <= 1)).all():
        raise RuntimeError("expected probabilities p_in >= 0 && p_in <= 1")
    return (chance < p).to(tensor.dtype)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, Wrapper) else tensor


@decomposition(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Tensor | float, std: Tensor | float = 1, *, generator: Any = None) -> Tensor:
    """Return normal numbers around ``mean``."""
    refuse_generator(aten.normal.Tensor_Tensor, {"generator": generator})
    if not isinstance(std, Tensor) and std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    mean, std = _without_terms(mean), _without_terms(std)
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    like = tensors[0] if len(tensors) == 1 else torch.add(*tensors)
    numbers = torch.randn_like(like)
    if isinstance(std, Tensor) and not (_local(std) >= 0).all():
        raise RuntimeError("normal expects all elements of std >= 0.0")
    return numbers * std + mean


def _without_terms(value: Any) -> Any:
    """Return a tensor reduced: each term would be rounded by itself."""
    return reduced(value) if isinstance(value, Wrapper) else value


@decomposition(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def randint_like(tensor: Tensor, high: Tensor, **kwargs: Any) -> Tensor:
    """Return integers below the value of a tensor of one element."""
    refuse_generator(aten.randint_like.Tensor_generator, kwargs)
    kwargs.pop("generator", None)
    return torch.randint_like(tensor, int(high.item()), **kwargs)


@decomposition(aten.rrelu_with_noise.default)
def rrelu_with_noise(tensor: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return negative elements times a slope, others as they are; ``noise`` becomes the slopes."""
    result, slopes = rrelu_with_noise_functional(tensor, noise, *args, **kwargs)
    noise.copy_(slopes)
    return result


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
    refuse_generator(aten.rrelu_with_noise.default, {"generator": generator})
    if not training:
        return torch.nn.functional.leaky_relu(tensor, (lower + upper) / 2), noise
    tensor = _without_terms(tensor)
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
