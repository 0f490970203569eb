"""Elements in other places of the same dims, or zero where a mask of the operator says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .engine.table import LocalCall, OpCall, Rule, rule
from .views import all_dims, unary, without

aten = torch.ops.aten


@rule(aten.flip.default)
def flip(call: OpCall) -> Rule:
    """Dims in reverse, which must be whole."""
    dims, _ = without(call.specs[0].ndim, *call.args[1])
    return unary(call, dims, dims)


@rule(aten.roll.default)
def roll(call: OpCall) -> Rule:
    """Dims turned around, which must be whole; without dims it is the flat tensor."""
    ndim = call.specs[0].ndim
    dims, _ = without(ndim, *(call.arg(2, "dims", ()) or range(ndim)))
    return unary(call, dims, dims)


@rule(aten.tril.default, aten.triu.default)
def triangle(call: OpCall) -> Rule:
    """One side of a diagonal of the last two dims, which on a part of them lies elsewhere."""
    dims = all_dims(call.specs[0].ndim)
    return unary(call, dims, dims, _shifted)


def _shifted(local: LocalCall) -> Callable[..., Any] | None:
    source = local.inputs[0]
    if source.box is None:
        return None
    row, column = source.box.offsets[-2:]
    op, diagonal = local.op, local.call.arg(1, "diagonal", 0) + row - column

    def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return op(tensor, diagonal)

    return run
