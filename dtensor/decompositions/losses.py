"""Losses whose parts meet in single precision, and means of weighted losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .pieces import cut_axes, has_terms, is_low
from .table import Decomposition, decomposition

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2


def _is_whole(*tensors: Tensor | None) -> bool:
    return not any(has_terms(t) or cut_axes(t, range(t.ndim)) for t in tensors if t is not None)


def _single(tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and is_low(tensor.dtype):
        return tensor.to(torch.float32)
    return tensor


def _in_single(op: Any, position: int) -> Decomposition:
    """Return the loss of low precision values, reduced in single precision."""

    def run(values: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = args[position - 2] if len(args) > position - 2 else kwargs.get("reduction", _MEAN)
        if given == _NONE or not is_low(values.dtype) or _is_whole(values, target):
            return NotImplemented
        rest = [_single(arg) for arg in args]
        return op(_single(values), _single(target), *rest, **kwargs).to(values.dtype)

    return run


for _op, _position in (
    (aten.mse_loss.default, 2),
    (aten.huber_loss.default, 2),
    (aten.smooth_l1_loss.default, 2),
    (aten.soft_margin_loss.default, 2),
    (aten.binary_cross_entropy.default, 3),
    (aten.binary_cross_entropy_with_logits.default, 4),
):
    decomposition(_op)(_in_single(_op, _position))


def _nll_loss(op: Any) -> Decomposition:
    def run(
        values: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
    ) -> Any:
        if reduction == _NONE:
            return NotImplemented
        low = is_low(values.dtype)
        if reduction == _SUM and not low:
            return NotImplemented
        total, count = op(_single(values), target, _single(weight), _SUM, ignore_index)
        result = total / count if reduction == _MEAN else total
        return result.to(values.dtype), count.to(values.dtype)

    return run


for _op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
    decomposition(_op)(_nll_loss(_op))
