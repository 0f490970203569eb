"""Tensors joined along a dim."""

from __future__ import annotations

import torch

from ..geometry.placement import REDUCE_OPS
from .engine.dims import all_dims, with_dim, without
from .engine.factors import Dim, Dims, Factors
from .engine.rules import moving
from .engine.table import OpCall, Rule, rule
from .packed import join_parts

aten = torch.ops.aten


@rule(aten.cat.default)
def cat_rule(call: OpCall) -> Rule:
    """Parts of a dim, packed where all are sharded alike there; else it is cut into even chunks, of
    which each rank gets what it lacks."""
    out = all_dims(len(call.output_shape))
    dim, start = call.arg("dim") % len(out), 0
    packed = join_parts(call, dim)
    if packed is not None:
        return packed
    inputs: list[Dims] = []
    for spec in call.specs:
        if spec.ndim != len(out):  # a tensor of shape (0,), which stands for nothing
            inputs.append((None,) * spec.ndim)
            continue
        window = range(start, start + spec.shape[dim])
        inputs.append(with_dim(out, dim, Dim(dim, window=window)))
        start = window.stop
    every = frozenset(range(len(inputs)))
    return Factors(
        call, tuple(inputs), (out,), linear=(every,), linear_ops=REDUCE_OPS, even=frozenset({dim})
    )


@rule(aten.stack.default)
def stack_rule(call: OpCall) -> Rule:
    """A new dim, which is whole."""
    out, rest = without(len(call.output_shape), call.arg("dim"))
    return moving(call, (rest,) * len(call.specs), (out,))
