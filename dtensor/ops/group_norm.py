"""Group norm: samples and groups of channels pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .engine.factors import Dim, Dims, Factors
from .engine.kernel_dtypes import dtypes_by_kernel
from .engine.local_kernels import zeros
from .engine.table import LocalCall, OpCall, Rule, in_any_order, meta, rule

aten = torch.ops.aten

_SAMPLE, _CHANNEL = 0, 1

dtypes_by_kernel(aten.native_group_norm.default, aten.native_group_norm_backward.default)


@meta(aten.native_group_norm.default)
def group_norm_meta(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results; torch divides by the number of elements, which may be none."""
    if values.numel():
        op = aten.native_group_norm.default
        return op(values, weight, bias, samples, channels, size, groups, eps)
    mean = values.new_empty([samples, groups])
    return torch.empty_like(values), mean, torch.empty_like(mean)


@meta(aten.native_group_norm_backward.default)
def group_norm_backward_meta(
    grad: Tensor, values: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Return empty gradients."""
    *sizes, mask = rest
    if values.numel():
        op = aten.native_group_norm_backward.default
        return op(grad, values, mean, scale, weight, *sizes, mask)
    channel = values.new_empty([sizes[1]])
    made = (torch.empty_like(values), channel, torch.empty_like(channel))
    return tuple(m if wanted else None for m, wanted in zip(made, mask, strict=True))


@rule(aten.native_group_norm.default)
def group_norm_rule(call: OpCall) -> Rule:
    """Group norm: an axis cuts channels between groups."""
    values, group = _dims(call, 0)
    weights: tuple[Dims, ...] = (values[1:2],) * (len(call.specs) - 1)
    return Factors(call, (values, *weights), (values, group, group), local=_local_forward)


@rule(aten.native_group_norm_backward.default)
def group_norm_backward_rule(call: OpCall) -> Rule:
    """Its gradients: those of weight and bias sum over the samples."""
    values, group = _dims(call, 1)
    channel: Dims = values[1:2]
    weights = (channel,) * (len(call.specs) - 4)
    return Factors(
        call,
        inputs=(values, values, group, group, *weights),
        outputs=tuple(
            dims if meta else ()
            for dims, meta in zip((values, channel, channel), call.outputs, strict=True)
        ),
        reduce={_SAMPLE: "sum"},
        local=_local_backward,
    )


def _dims(call: OpCall, index: int) -> tuple[Dims, Dims]:
    """Return the dims of the values and of what there is one of per group."""
    spec = call.specs[index]
    unit = _unit(call, spec.shape[1])
    has_channels = spec.shape[1] > 0  # there are groups of none, which nothing cuts
    channel = Dim(_CHANNEL) if has_channels else None
    values: Dims = (Dim(_SAMPLE), channel, *(None,) * (spec.ndim - 2))
    return values, (Dim(_SAMPLE), Dim(_CHANNEL, unit) if has_channels else None)


def _unit(call: OpCall, channels: int) -> int:
    """Return the number of channels of a group, 1 where there are none at all."""
    return channels // call.arg("group") or 1


@in_any_order
def _local_forward(local: LocalCall) -> Callable[..., Any]:
    unit = _unit(local.call, local.call.specs[0].shape[1])
    empties = zeros(local)

    def run(values: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
        if 0 in values.shape[:2]:  # channels without elements have a mean, and gradients
            return empties(values)
        sizes = _sizes(values, unit)
        return aten.native_group_norm.default(values.contiguous(), weight, bias, *sizes, rest[-1])

    return run


@in_any_order
def _local_backward(local: LocalCall) -> Callable[..., Any]:
    unit = _unit(local.call, local.call.specs[1].shape[1])
    empties = zeros(local)

    def run(
        grad: Tensor, values: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, *rest: Any
    ) -> Any:
        if 0 in values.shape[:2]:  # channels without elements have a mean, and gradients
            return empties(values)
        sizes = _sizes(values, unit)
        return aten.native_group_norm_backward.default(
            grad.contiguous(), values.contiguous(), mean, scale, weight, *sizes, rest[-1]
        )

    return run


def _sizes(values: Tensor, unit: int) -> Sequence[int]:
    """Return what the operator asks for: samples, channels, elements of a channel, groups."""
    samples, channels = values.shape[:2]
    return samples, channels, values.numel() // (samples * channels), channels // unit
