"""Losses: sums over samples leave Partial results, means divide by the samples of all ranks.

In half precision the losses of parts meet in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..tensor.schemas import Op, argument_of
from .engine.dims import all_dims, broadcast_dims, leading
from .engine.dtypes import is_low
from .engine.factors import FIRST, Dims, Factors
from .engine.forms import operators
from .engine.gathered import on_gathered
from .engine.kernel_dtypes import dtypes_by_kernel, kernel_dtypes
from .engine.kernel_strides import strides_by_kernel
from .engine.local_kernels import with_argument
from .engine.primitives import cut_axes, has_terms
from .engine.table import (
    Decomposition,
    LocalCall,
    LocalMaker,
    OpCall,
    Rule,
    decomposition,
    in_any_order,
    meta,
    rule,
)

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""What torch's enumeration of reductions says."""


_OF_ELEMENTS = operators(
    aten,
    "mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy"
    " binary_cross_entropy_with_logits",
)


@rule(*_OF_ELEMENTS)
def of_elements_rule(call: OpCall) -> Rule:
    """Losses of single elements."""
    shape = tuple(torch.broadcast_shapes(*[spec.shape for spec in call.specs]))
    inputs = tuple(broadcast_dims(spec, shape) for spec in call.specs)
    return _loss(call, inputs, (all_dims(len(shape)),), math.prod(shape))


_OF_ELEMENTS_BACKWARD = operators(
    aten,
    "mse_loss_backward huber_loss_backward smooth_l1_loss_backward soft_margin_loss_backward"
    " binary_cross_entropy_backward",
)

# Predictions and targets of unlike dtypes are promoted by some, and refused by others.
dtypes_by_kernel(*_OF_ELEMENTS, *_OF_ELEMENTS_BACKWARD)
strides_by_kernel(*_OF_ELEMENTS, *_OF_ELEMENTS_BACKWARD)


@meta(*_OF_ELEMENTS_BACKWARD)
def of_elements_backward_meta(
    grad: Tensor, values: Tensor, target: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Return an empty gradient; torch divides by the number of elements, which may be none."""
    return (values - target) * grad


@rule(*_OF_ELEMENTS_BACKWARD)
def of_elements_backward_rule(call: OpCall) -> Rule:
    """Their gradients: elements again, scaled by the number of all."""
    shape = tuple(call.specs[1].shape)
    inputs = tuple(broadcast_dims(spec, shape) for spec in call.specs)
    return _loss_backward(call, inputs, all_dims(len(shape)), math.prod(shape))


@rule(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default)
def of_samples_rule(call: OpCall) -> Rule:
    """Losses of samples, whose classes must be whole."""
    inputs, count = _samples(call, call.specs[0])
    samples = inputs[0][:-1]
    metas = [meta for meta in call.outputs[1:] if meta]
    outputs = (samples, *(leading(len(meta.shape), len(samples)) for meta in metas))
    return _loss(call, inputs, outputs, count)


@rule(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
def of_samples_backward_rule(call: OpCall) -> Rule:
    """Their gradients."""
    inputs, count = _samples(call, call.specs[1])
    return _loss_backward(call, inputs, inputs[1], count)


def _samples(call: OpCall, source: DTensorSpec) -> tuple[tuple[Dims, ...], int]:
    """Return the dims of all tensors, of which the first one counts samples, and their number.

    The weight of the classes, the last tensor where there is one, is whole.
    """
    has_samples = source.ndim == 2
    inputs = tuple(leading(spec.ndim, int(has_samples)) for spec in call.specs)
    if call.arg("weight") is not None:
        inputs = (*inputs[:-1], (None,))
    return inputs, source.shape[0] if has_samples else 1


def _loss(call: OpCall, inputs: tuple[Dims, ...], outputs: tuple[Dims, ...], count: int) -> Rule:
    """Return the rule of a loss; ``outputs`` are its dims without reduction."""
    if call.arg("reduction") == NONE:
        return Factors(call, inputs, outputs)
    factors = {dim.factor for dims in inputs for dim in dims if dim is not None}
    return Factors(
        call,
        inputs=inputs,
        outputs=((), *outputs[1:]),
        reduce=dict.fromkeys(factors, "sum"),
        local=_local_sum(count if call.arg("reduction") == MEAN else 1),
    )


def _local_sum(count: int) -> LocalMaker:
    """Return what sums the losses of a part and divides them by ``count``, the number of all."""

    @in_any_order
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        first = local.outputs[0]
        if first is None or not first.layout.is_partial:
            return None
        total_of = with_argument(local.call.op, "reduction", SUM)

        def share(total: Tensor, values: Tensor) -> Tensor:
            # Not every kernel sums no losses to 0. The mean of none at all is not a number.
            return (total if values.numel() else torch.zeros_like(total)) / count

        def run(values: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = total_of(values, *args, **kwargs)
            if isinstance(result, Tensor):
                return share(result, values)
            return (share(result[0], values), *result[1:])

        return run

    return maker


def _loss_backward(call: OpCall, inputs: tuple[Dims, ...], output: Dims, count: int) -> Rule:
    return Factors(
        call,
        inputs=inputs,
        outputs=(output,),
        linear=FIRST,
        local=_local_mean_backward(count) if call.arg("reduction") == MEAN else None,
    )


def _local_mean_backward(count: int) -> LocalMaker:
    @in_any_order
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        first = local.outputs[0]
        if first is None or not any(first.layout.splits):
            return None
        of_total = with_argument(local.call.op, "reduction", SUM)

        def run(*args: Any, **kwargs: Any) -> Any:
            return of_total(*args, **kwargs) / count

        return run

    return maker


@meta(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
def margin_loss_backward_meta(grad: Tensor, values: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty tensor like the values."""
    del grad
    return torch.empty_like(values)


def _is_whole(*tensors: Tensor | None) -> bool:
    return not any(has_terms(t) or cut_axes(t, range(t.ndim)) for t in tensors if t is not None)


def single_if_low(tensor: Any) -> Any:
    """Return a tensor of half precision in single precision, anything else as it is."""
    if isinstance(tensor, Tensor) and is_low(tensor.dtype):
        return tensor.to(torch.float32)
    return tensor


def _in_single(op: Op) -> Decomposition:
    """Return the loss of low precision values, whose terms meet in single precision.

    The terms themselves are those of the kernel: what overflows there does here, too.
    """
    terms_of = with_argument(op, "reduction", NONE)

    def run(*args: Any, **kwargs: Any) -> Any:
        values, target = args[:2]
        reduction = argument_of(op, args, kwargs, "reduction")
        if reduction == NONE or _is_whole(values, target):
            return NotImplemented
        dtypes = kernel_dtypes(op, args, kwargs, values.device.type)
        result = dtypes[0] if dtypes else None
        if result is None or not is_low(result):
            return NotImplemented
        terms = terms_of(*args, **kwargs)
        return terms.mean() if reduction == MEAN else terms.sum()

    return run


for _op in _OF_ELEMENTS:
    decomposition(_op)(_in_single(_op))

on_gathered(
    *operators(aten, "_ctc_loss.Tensor _ctc_loss _ctc_loss_backward.Tensor _ctc_loss_backward")
)
