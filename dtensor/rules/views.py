"""Views: dims that are moved, joined, split, added or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..placement import REDUCE_OPS
from .factors import Dim, Dims, Factors
from .local import reshaped, with_local_shape
from .table import LocalMaker, OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten.t.default, aten.transpose.int, aten.permute.default)
def permuted(call: OpCall) -> Rule:
    """Dims in another order."""
    ndim = call.specs[0].ndim
    order = list(range(ndim))
    if call.op is aten.permute.default:
        order = [dim % ndim for dim in call.args[1]]
    elif ndim:
        a, b = (0, ndim - 1) if call.op is aten.t.default else call.args[1:3]
        order[a % ndim], order[b % ndim] = order[b % ndim], order[a % ndim]
    return _unary(call, _all(ndim), tuple(Dim(i) for i in order))


@rule(aten.unsqueeze.default)
def unsqueezed(call: OpCall) -> Rule:
    """A new dim of size 1."""
    ndim = call.specs[0].ndim
    out: list[Dim | None] = list(_all(ndim))
    out.insert(call.args[1] % (ndim + 1), None)
    return _unary(call, _all(ndim), tuple(out))


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def reshape(call: OpCall) -> Rule:
    """Dims joined and split; a group of them may be cut along its first dim."""
    first = call.outputs[0]
    inputs, outputs = reshape_dims(call.specs[0].shape, first.shape if first else ())
    return _unary(call, inputs, outputs, reshaped)


@rule(aten.expand.default)
def expanded(call: OpCall) -> Rule:
    """Dims of size 1 repeated, and new ones in front."""
    source, first = call.specs[0], call.outputs[0]
    shape = first.shape if first else ()
    lead = len(shape) - source.ndim
    dims: Dims = tuple(
        Dim(i) if size == shape[lead + i] else None for i, size in enumerate(source.shape)
    )
    return _unary(call, dims, (None,) * lead + dims, with_local_shape(1, "size"))


@rule(aten.select.int)
def selected(call: OpCall) -> Rule:
    """One index of a dim, which must be whole."""
    ndim = call.specs[0].ndim
    dim = call.args[1] % ndim
    dims: Dims = tuple(None if i == dim else Dim(i) for i in range(ndim))
    return _unary(call, dims, dims[:dim] + dims[dim + 1 :])


@rule(aten.slice.Tensor)
def sliced(call: OpCall) -> Rule:
    """A range of a dim, which must be whole unless the range is all of it."""
    source, first = call.specs[0], call.outputs[0]
    dim = call.arg(1, "dim", 0) % source.ndim
    everything = first is not None and first.shape == source.shape and call.arg(4, "step", 1) == 1
    dims: Dims = tuple(None if i == dim and not everything else Dim(i) for i in range(source.ndim))
    return _unary(call, dims, dims)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def parts(call: OpCall) -> Rule:
    """A dim, which must be whole, in several parts."""
    ndim = call.specs[0].ndim
    is_unbind = call.op is aten.unbind.int
    dim = call.arg(1 if is_unbind else 2, "dim", 0) % ndim
    dims: Dims = tuple(None if i == dim else Dim(i) for i in range(ndim))
    out = dims[:dim] + dims[dim + 1 :] if is_unbind else dims
    return _unary(call, dims, out)


@rule(aten.cat.default, aten.stack.default)
def joined(call: OpCall) -> Rule:
    """Tensors joined along a dim, which must be whole."""
    first = call.outputs[0]
    ndim = len(first.shape) if first else 0
    dim = call.arg(1, "dim", 0) % ndim
    out: Dims = tuple(None if i == dim else Dim(i) for i in range(ndim))
    each = out[:dim] + out[dim + 1 :] if call.op is aten.stack.default else out
    inputs = tuple(each if spec.ndim == len(each) else (None,) * spec.ndim for spec in call.specs)
    every = frozenset(range(len(inputs)))
    return Rule(
        rows=Factors(
            call=call, inputs=inputs, outputs=(out,), linear=(every,), linear_ops=REDUCE_OPS
        )
    )


def reshape_dims(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """Return the factors of a reshape: one per smallest group of dims of equal product.

    The first dim of a group larger than 1 carries the factor, in units of what follows it.

    >>> reshape_dims((4, 3, 5), (12, 5))[0]
    (Dim(factor=0, unit=3), None, Dim(factor=1, unit=1))
    """
    inputs: list[Dim | None] = [None] * len(source)
    outputs: list[Dim | None] = [None] * len(target)
    if 0 in source:
        return tuple(inputs), tuple(outputs)
    i = j = factor = 0
    while i < len(source) and j < len(target):
        first, second = i, j
        product, other = source[i], target[j]
        i, j = i + 1, j + 1
        while product != other:
            if product < other:
                product, i = product * source[i], i + 1
            else:
                other, j = other * target[j], j + 1
        lead = _leading(source, first, i)
        led = _leading(target, second, j)
        if lead is not None and led is not None:
            inputs[lead] = Dim(factor, product // source[lead])
            outputs[led] = Dim(factor, product // target[led])
        factor += 1
    return tuple(inputs), tuple(outputs)


def _leading(shape: Sequence[int], start: int, end: int) -> int | None:
    return next((dim for dim in range(start, end) if shape[dim] > 1), None)


def _all(ndim: int) -> Dims:
    return tuple(Dim(i) for i in range(ndim))


def _unary(call: OpCall, inputs: Dims, outputs: Dims, local: LocalMaker | None = None) -> Rule:
    return Rule(
        rows=Factors(
            call=call,
            inputs=(inputs,),
            outputs=(outputs,) * len(call.outputs),
            linear=(frozenset({0}),),
            linear_ops=REDUCE_OPS,
        ),
        local=local,
    )
