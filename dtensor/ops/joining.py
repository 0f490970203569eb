"""Tensors joined along a dim."""

from __future__ import annotations

import torch

from ..geometry.placement import REDUCE_OPS
from .engine.dims import all_dims
from .engine.factors import Dim, Dims, Factors
from .engine.table import OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten.cat.default)
def concatenated(call: OpCall) -> Rule:
    """Parts of a dim, which is cut into even chunks: each rank gets what it lacks of its own."""
    first = call.outputs[0]
    ndim = len(first.shape) if first else 0
    dim = call.arg(1, "dim", 0) % ndim
    out = all_dims(ndim)
    inputs: list[Dims] = []
    start = 0
    for spec in call.specs:
        if spec.ndim != ndim:  # a tensor of shape (0,), which stands for nothing
            inputs.append((None,) * spec.ndim)
            continue
        window = range(start, start + spec.shape[dim])
        inputs.append((*out[:dim], Dim(dim, window=window), *out[dim + 1 :]))
        start = window.stop
    return _joined(call, tuple(inputs), out, frozenset({dim}))


@rule(aten.stack.default)
def stacked(call: OpCall) -> Rule:
    """A new dim, which is whole."""
    first = call.outputs[0]
    ndim = len(first.shape) if first else 0
    dim = call.arg(1, "dim", 0) % ndim
    out: Dims = tuple(None if i == dim else Dim(i) for i in range(ndim))
    return _joined(call, (out[:dim] + out[dim + 1 :],) * len(call.specs), out, frozenset())


def _joined(call: OpCall, inputs: tuple[Dims, ...], out: Dims, even: frozenset[int]) -> Rule:
    every = frozenset(range(len(inputs)))
    return Rule(
        rows=Factors(
            call=call,
            inputs=inputs,
            outputs=(out,),
            linear=(every,),
            linear_ops=REDUCE_OPS,
            even=even,
        )
    )
