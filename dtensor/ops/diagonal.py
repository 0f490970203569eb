"""Diagonals, triangles and traces, of which two dims must be whole, or are told where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .engine.dims import all_dims, without
from .engine.factors import FIRST, Factors
from .engine.forms import operators
from .engine.local_kernels import with_local_shape
from .engine.rules import moving
from .engine.table import LocalCall, OpCall, Rule, decomposition, rule

aten = torch.ops.aten


@rule(*operators(aten, "diagonal diagonal_backward diagonal_scatter diag_embed"))
def diagonal_rule(call: OpCall) -> Rule:
    """The diagonal of two dims, which must be whole, as a last dim: taken, placed or replaced."""
    shapes = [*(spec.shape for spec in call.specs), call.output_shape]
    ndim = max(map(len, shapes))
    dims, rest = without(ndim, call.arg("dim1"), call.arg("dim2"))
    *inputs, output = (dims if len(shape) == ndim else (*rest, None) for shape in shapes)
    local = with_local_shape("input_sizes") if call.arg("input_sizes") is not None else None
    return moving(call, tuple(inputs), (output,), local)


@rule(aten.tril.default, aten.triu.default)
def triangle_rule(call: OpCall) -> Rule:
    """One side of a diagonal of the last two dims, which on a part of them lies elsewhere."""
    dims = all_dims(call.specs[0].ndim)
    return moving(call, (dims,), (dims,), _shifted)


def _shifted(local: LocalCall) -> Callable[..., Any] | None:
    source = local.inputs[0]
    if source.box is None:
        return None
    row, column = source.box.offsets[-2:]
    op, diagonal = local.op, local.call.arg("diagonal") + row - column

    def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return op(tensor, diagonal)

    return run


@rule(aten.trace.default)
def trace_rule(call: OpCall) -> Rule:
    """The sum of the diagonal, for which a matrix must be whole."""
    return Factors(call, ((None, None),), ((),), linear=FIRST)


@decomposition(aten.block_diag.default)
def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """Return matrices along a diagonal: each padded to its place, one under the other."""
    blocks = [tensor if tensor.ndim == 2 else tensor.reshape(1, -1) for tensor in tensors]
    width, before = sum(block.shape[1] for block in blocks), 0
    rows: list[Tensor] = []
    for block in blocks:
        after = width - before - block.shape[1]
        rows.append(torch.constant_pad_nd(block, [before, after]))
        before += block.shape[1]
    return torch.cat(rows)


@decomposition(aten.trace.default)
def trace(tensor: Tensor) -> Tensor:
    """Return the sum of the diagonal, what is beside it set to zero."""
    return tensor.tril().triu().sum()
