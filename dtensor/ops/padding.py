"""Padding: with constants each rank pads what it has, with values of the tensor dims are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import REDUCE_OPS
from .engine.factors import Dim
from .engine.forms import Form, linear, register_forms
from .engine.rules import moving
from .engine.table import LocalCall, OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten.constant_pad_nd.default)
def constant_pad_rule(call: OpCall) -> Rule:
    """Constants around a tensor, or with negative widths less of it."""
    source, shape = call.specs[0], call.output_shape
    _refuse_value(call)
    inputs, outputs = list[Dim | None](), list[Dim | None]()
    for i, (before, after) in enumerate(_widths(call)):
        here = range(max(before, 0), max(before, 0) + source.shape[i])
        there = range(max(-before, 0), max(-before, 0) + shape[i])
        changes = before != 0 or after != 0
        inputs.append(Dim(i, window=here if changes else None))
        outputs.append(Dim(i, window=there if changes else None))
    # A constant is a term of a mean or an extreme as it is, and zero is one of anything.
    ops = REDUCE_OPS if call.arg("value") == 0 else ("avg", "max", "min")
    return moving(call, (tuple(inputs),), (tuple(outputs),), _local_pad, ops)


def _refuse_value(call: OpCall) -> None:
    """Raise what kernels raise for a value that the dtype has not; not every rank adds some."""
    if any(width > 0 for width in call.arg("pad")):
        torch.full((2,), call.arg("value"), dtype=call.specs[0].dtype)


def _widths(call: OpCall) -> list[tuple[int, int]]:
    """Return what is added before and after each dim; they are given from the last dim on."""
    pads, ndim = call.arg("pad"), call.specs[0].ndim
    pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def _local_pad(local: LocalCall) -> Callable[..., Any] | None:
    source, output = local.inputs[0], local.outputs[0]
    if output is None or source.box is None or output.box is None:
        return None
    pads: list[int] = []
    for dim, (before, _) in reversed(list(enumerate(_widths(local.call)))):
        here = source.box.offsets[dim] + max(before, 0)
        there = output.box.offsets[dim] + max(-before, 0)
        ends = here + source.box.sizes[dim], there + output.box.sizes[dim]
        pads += [here - there, ends[1] - ends[0]]
    shape, is_empty = local.output_shape, 0 in source.box.sizes

    def run(tensor: Tensor, _: Any, value: Any = 0) -> Tensor:
        if 0 in shape:  # no value is written, which need not be one of the dtype
            return tensor.new_empty(shape)
        if is_empty:
            return tensor.new_full(shape, value)
        return aten.constant_pad_nd.default(tensor, pads, value)

    return run


_PADDED = {1: "*.", 2: "*..", 3: "*..."}

PADS: dict[str, str | Form] = {
    f"{kind}_pad{ndim}d{suffix}": linear(
        f"{dims}, {dims} -> {dims}" if suffix else f"{dims} -> {dims}"
    )
    for kind in ("reflection", "replication")
    for ndim, dims in _PADDED.items()
    for suffix in ("", "_backward")
}

register_forms(aten, PADS)
