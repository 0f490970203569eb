"""Softmax and layer norm: some dims must be whole, the rest pass through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .engine.factors import Dim, Dims, Factors
from .engine.table import METAS, OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten._softmax.default, aten._log_softmax.default)
def softmax(call: OpCall) -> Rule:
    """Softmax along one dim."""
    dims = _all_but(call.specs[0].ndim, call.args[1])
    return Rule(rows=Factors(call=call, inputs=(dims,), outputs=(dims,)))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: OpCall) -> Rule:
    """Its gradient, from the gradient and the values of the output."""
    dims = _all_but(call.specs[0].ndim, call.args[2])
    return Rule(rows=Factors(call=call, inputs=(dims, dims), outputs=(dims,)))


@rule(aten.native_layer_norm.default)
def layer_norm(call: OpCall) -> Rule:
    """Layer norm over the last dims: values, means and inverse deviations."""
    ndim, normalised = call.specs[0].ndim, len(call.args[1])
    dims = _leading(ndim, ndim - normalised)
    weights = tuple((None,) * spec.ndim for spec in call.specs[1:])
    return Rule(rows=Factors(call=call, inputs=(dims, *weights), outputs=(dims, dims, dims)))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(call: OpCall) -> Rule:
    """Its gradients: those of weight and bias sum over the leading dims."""
    ndim, normalised = call.specs[0].ndim, len(call.args[2])
    lead = ndim - normalised
    dims = _leading(ndim, lead)
    weights = tuple((None,) * spec.ndim for spec in call.specs[4:])
    whole: Dims = (None,) * normalised
    return Rule(
        rows=Factors(
            call=call,
            inputs=(dims, dims, dims, dims, *weights),
            outputs=(dims, whole, whole),
            reduce=dict.fromkeys(range(lead), "sum"),
        )
    )


@rule(aten._masked_softmax.default)
def masked_softmax(call: OpCall) -> Rule:
    """Softmax with a mask of the same shape, or of another (by its type) on whole tensors."""
    ndim, dim = call.specs[0].ndim, call.arg(2, "dim")
    dims = _all_but(ndim, ndim - 1 if dim is None else dim)
    if call.specs[0].shape != call.specs[1].shape:
        dims = (None,) * ndim
    mask = dims if call.specs[1].ndim == ndim else (None,) * call.specs[1].ndim
    return Rule(rows=Factors(call=call, inputs=(dims, mask), outputs=(dims,)))


@rule(aten._masked_softmax_backward.default)
def masked_softmax_backward(call: OpCall) -> Rule:
    """Its gradient."""
    ndim, dim = call.specs[0].ndim, call.arg(3, "dim")
    dims = _all_but(ndim, ndim - 1 if dim is None else dim)
    if call.specs[0].shape != call.specs[2].shape:
        dims = (None,) * ndim
    mask = dims if call.specs[2].ndim == ndim else (None,) * call.specs[2].ndim
    return Rule(rows=Factors(call=call, inputs=(dims, dims, mask), outputs=(dims,)))


def _like_first(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(tensor)


METAS[aten._masked_softmax.default] = _like_first
METAS[aten._masked_softmax_backward.default] = _like_first


@rule(aten._fused_rms_norm.default)
def rms_norm(call: OpCall) -> Rule:
    """RMS norm over the last dims: values and inverse roots of mean squares."""
    ndim = call.specs[0].ndim
    dims = _leading(ndim, ndim - len(call.args[1]))
    weights = tuple((None,) * spec.ndim for spec in call.specs[1:])
    return Rule(rows=Factors(call=call, inputs=(dims, *weights), outputs=(dims, dims)))


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(call: OpCall) -> Rule:
    """Its gradients: that of the weight sums over the leading dims."""
    ndim, normalised = call.specs[0].ndim, len(call.args[2])
    lead = ndim - normalised
    dims = _leading(ndim, lead)
    weights = tuple((None,) * spec.ndim for spec in call.specs[3:])
    return Rule(
        rows=Factors(
            call=call,
            inputs=(dims, dims, dims, *weights),
            outputs=(dims, (None,) * normalised),
            reduce=dict.fromkeys(range(lead), "sum"),
        )
    )


def _all_but(ndim: int, dim: int) -> Dims:
    return tuple(None if i == dim % max(ndim, 1) else Dim(i) for i in range(ndim))


def _leading(ndim: int, count: int) -> Dims:
    return tuple(Dim(i) if i < count else None for i in range(ndim))
