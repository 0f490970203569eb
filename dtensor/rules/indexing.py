"""Picking and placing elements: the dim that is indexed must be whole."""

from __future__ import annotations

import torch

from .factors import Dim, Dims, Factors
from .local import with_local_shape
from .table import OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten.select_backward.default, aten.slice_backward.default)
def select_backward(call: OpCall) -> Rule:
    """The gradient of a view of some indices: zero elsewhere."""
    first = call.outputs[0]
    shape = first.shape if first else ()
    dim = call.args[2] % len(shape)
    is_slice = call.op is aten.slice_backward.default
    everything = is_slice and call.specs[0].shape == shape and call.args[5] == 1
    out: Dims = tuple(None if i == dim and not everything else Dim(i) for i in range(len(shape)))
    grad = out if is_slice else out[:dim] + out[dim + 1 :]
    return Rule(
        rows=Factors(call=call, inputs=(grad,), outputs=(out,), linear=(frozenset({0}),)),
        local=with_local_shape(1, "input_sizes"),
    )


@rule(aten.flip.default)
def flip(call: OpCall) -> Rule:
    """Dims in reverse, which must be whole."""
    ndim = call.specs[0].ndim
    turned = {dim % max(ndim, 1) for dim in call.args[1]}
    dims: Dims = tuple(None if i in turned else Dim(i) for i in range(ndim))
    return Rule(rows=Factors(call=call, inputs=(dims,), outputs=(dims,), linear=(frozenset({0}),)))


@rule(aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def along_dim(call: OpCall) -> Rule:
    """Elements by indices along one dim; dims that all tensors share pass through."""
    ndim = call.specs[0].ndim
    dim = call.args[1] % max(ndim, 1)
    if any(spec.ndim != ndim for spec in call.specs):
        dims: Dims = (None,) * ndim
        inputs = tuple((None,) * spec.ndim for spec in call.specs)
        return Rule(rows=Factors(call=call, inputs=inputs, outputs=(dims,)))
    shapes = [spec.shape for spec in call.specs]
    dims = tuple(
        Dim(i) if i != dim and len({shape[i] for shape in shapes}) == 1 else None
        for i in range(ndim)
    )
    return Rule(rows=Factors(call=call, inputs=(dims,) * len(shapes), outputs=(dims,)))
