"""Norms over the elements of channels and groups of them: samples and channels pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .engine.factors import Dim, Dims, Factors
from .engine.table import LocalCall, OpCall, Rule, rule

aten = torch.ops.aten

_SAMPLE, _CHANNEL = 0, 1


@rule(aten.native_group_norm.default)
def group_norm(call: OpCall) -> Rule:
    """Group norm: an axis cuts channels between groups."""
    values, group = _dims(call, 0, call.args[6])
    weights: tuple[Dims, ...] = ((Dim(_CHANNEL),),) * (len(call.specs) - 1)
    return Rule(
        rows=Factors(call=call, inputs=(values, *weights), outputs=(values, group, group)),
        local=_local_forward,
    )


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(call: OpCall) -> Rule:
    """Its gradients: those of weight and bias sum over the samples."""
    values, group = _dims(call, 1, call.args[8])
    channel: Dims = (Dim(_CHANNEL),)
    weights = (channel,) * (len(call.specs) - 4)
    return Rule(
        rows=Factors(
            call=call,
            inputs=(values, values, group, group, *weights),
            outputs=tuple(
                dims if meta else ()
                for dims, meta in zip((values, channel, channel), call.outputs, strict=True)
            ),
            reduce={_SAMPLE: "sum"},
        ),
        local=_local_backward,
    )


def _dims(call: OpCall, index: int, groups: int) -> tuple[Dims, Dims]:
    """Return the dims of the values and of what there is one of per group."""
    spec = call.specs[index]
    unit = spec.shape[1] // groups
    values: Dims = (Dim(_SAMPLE), Dim(_CHANNEL), *(None,) * (spec.ndim - 2))
    return values, (Dim(_SAMPLE), Dim(_CHANNEL, unit))


def _local_forward(local: LocalCall) -> Callable[..., Any]:
    unit = local.call.specs[0].shape[1] // local.call.args[6]
    empties = _empties(local)

    def run(values: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
        if values.numel() == 0:
            return empties(values)
        sizes = _sizes(values, unit)
        return aten.native_group_norm.default(values.contiguous(), weight, bias, *sizes, rest[-1])

    return run


def _local_backward(local: LocalCall) -> Callable[..., Any]:
    unit = local.call.specs[1].shape[1] // local.call.args[8]
    empties = _empties(local)

    def run(
        grad: Tensor,
        values: Tensor,
        mean: Tensor,
        scale: Tensor,
        weight: Tensor | None,
        *rest: Any,
    ) -> Any:
        if values.numel() == 0:
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


def _empties(local: LocalCall) -> Callable[[Tensor], tuple[Tensor | None, ...]]:
    """Return what makes the results of a part without elements: sums of nothing."""
    outputs = local.outputs

    def make(like: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            None if spec is None else like.new_zeros(spec.local_shape, dtype=spec.dtype)
            for spec in outputs
        )

    return make


@rule(aten._weight_norm_interface.default)
def weight_norm(call: OpCall) -> Rule:
    """Values of a given norm along one dim, which passes through."""
    dims = _along(call.specs[0].ndim, call.arg(2, "dim", 0))
    return Rule(
        rows=Factors(call=call, inputs=(dims, dims), outputs=(dims, dims)), local=_local_weights
    )


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(call: OpCall) -> Rule:
    """Its gradients."""
    dims = _along(call.specs[0].ndim, call.args[4])
    return Rule(
        rows=Factors(call=call, inputs=(dims,) * 4, outputs=(dims, dims), linear=(frozenset({0}),)),
        local=_local_weights,
    )


def _local_weights(local: LocalCall) -> Callable[..., Any] | None:
    """Return what makes results without elements, for which the kernels divide by 0."""
    first = local.outputs[0]
    if first is None or 0 not in first.local_shape:
        return None
    empties = _empties(local)

    def run(values: Tensor, *_: Any) -> Any:
        return empties(values)

    return run


def _along(ndim: int, dim: int) -> Dims:
    return tuple(Dim(i) if i == dim % ndim else None for i in range(ndim))


@rule(aten.native_batch_norm.default)
def batch_norm(call: OpCall) -> Rule | None:
    """Batch norm of whole tensors; that of parts is split up (``decompositions.batch_norm``)."""
    # In evaluation its means are empty, of which torch without data does not know.
    return batch_norm_backward(call) if call.args[5] else None


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(call: OpCall) -> Rule:
    """Its gradients, of whole tensors too."""
    inputs: tuple[Dims, ...] = tuple((None,) * spec.ndim for spec in call.specs)
    outputs = tuple((None,) * len(meta.shape) if meta else () for meta in call.outputs)
    return Rule(rows=Factors(call=call, inputs=inputs, outputs=outputs))
