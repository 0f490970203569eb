"""Softmax, layer norm and embedding: some dims must be whole, the rest pass through."""

from __future__ import annotations

import torch

from .factors import Dim, Dims, Factors
from .table import OpCall, Rule, rule

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


@rule(aten.embedding.default)
def embedding(call: OpCall) -> Rule:
    """Rows of a weight, whose first dim must be whole."""
    count = call.specs[1].ndim
    indices: Dims = tuple(Dim(i) for i in range(count))
    column = Dim(count)
    return Rule(
        rows=Factors(call=call, inputs=((None, column), indices), outputs=((*indices, column),))
    )


@rule(aten.embedding_dense_backward.default)
def embedding_backward(call: OpCall) -> Rule:
    """The gradient of the weight: a sum over all indices."""
    count = call.specs[1].ndim
    indices: Dims = tuple(Dim(i) for i in range(count))
    column = Dim(count)
    if call.args[4]:  # the gradient is divided by how often an index occurs, over all of them
        indices = (None,) * count
    return Rule(
        rows=Factors(
            call=call,
            inputs=((*indices, column), indices),
            outputs=((None, column),),
            reduce={} if call.args[4] else dict.fromkeys(range(count), "sum"),
            linear=(frozenset({0}),),
        )
    )


def _all_but(ndim: int, dim: int) -> Dims:
    return tuple(None if i == dim % max(ndim, 1) else Dim(i) for i in range(ndim))


def _leading(ndim: int, count: int) -> Dims:
    return tuple(Dim(i) if i < count else None for i in range(ndim))
