"""Negative log likelihood: every rank looks up the classes that it holds, so none are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..tensor.schemas import Op, argument_place
from .engine.dims import all_dims
from .engine.dtypes import is_low
from .engine.factors import FIRST, Dims, Factors
from .engine.table import Decomposition, LocalCall, OpCall, Rule, decomposition, meta, rule
from .loss import MEAN, NONE, SUM, single_if_low

aten = torch.ops.aten


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_rule(call: OpCall) -> Rule:
    """The loss, and the weight of all targets; a mean over parts is made of both sums."""
    classes, samples, weight = _dims(call.specs[0])
    inputs = (classes, samples, weight)[: len(call.specs)]
    if call.arg("reduction") == MEAN:
        inputs = tuple((None,) * len(dims) for dims in inputs)
    return Factors(
        call,
        inputs=inputs,
        outputs=(samples if call.arg("reduction") == NONE else (), ()),
        reduce=dict.fromkeys(range(len(classes)), "sum"),
        local=_local_loss,
        positions=frozenset({_class_dim(len(classes))}),
    )


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward_rule(call: OpCall) -> Rule:
    """Its gradient, for which only the weight of all targets is common."""
    classes, samples, weight = _dims(call.specs[1])
    grad = samples if call.arg("reduction") == NONE else ()
    has_weight = call.arg("weight") is not None
    inputs = (grad, classes, samples, weight, ()) if has_weight else (grad, classes, samples, ())
    return Factors(
        call,
        inputs,
        (classes,),
        linear=FIRST,
        local=_local_backward,
        positions=frozenset({_class_dim(len(classes))}),
    )


def _with_long_targets(op: Op) -> Callable[..., Any]:
    """Return the operator for tensors without data, where torch takes no targets in bytes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        place = argument_place(op, "target")
        index = place[0] if place else 0
        return op(*args[:index], args[index].long(), *args[index + 1 :], **kwargs)

    return run


for _op in (
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
):
    meta(_op)(_with_long_targets(_op))


def _dims(source: DTensorSpec) -> tuple[Dims, Dims, Dims]:
    """Return the dims of the values, of the targets and of the weight."""
    dims = all_dims(source.ndim)
    at = _class_dim(source.ndim)
    return dims, (*dims[:at], *dims[at + 1 :]), (dims[at],)


def _class_dim(ndim: int) -> int:
    return 0 if ndim == 1 else 1


def _own_classes(spec: DTensorSpec) -> int | None:
    """Return the first class that this rank holds, or None where it holds all."""
    at = _class_dim(spec.ndim)
    if spec.box is None or not spec.layout.splits[at]:
        return None
    return spec.box.offsets[at]


def _local_loss(local: LocalCall) -> Callable[..., Any] | None:
    start = _own_classes(local.inputs[0])
    if start is None:
        return None
    classes = local.inputs[0].shape[_class_dim(local.inputs[0].ndim)]

    def run(
        values: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
    ) -> tuple[Tensor, Tensor]:
        at = _class_dim(values.ndim)
        mine, index, weights = _targets(values, target, weight, start, ignored)
        is_class = (target >= 0) & (target < classes) | (target == ignored)
        if values.shape[at] == 0:
            picked = values.new_zeros(target.shape)
        else:
            picked = values.gather(at, index.unsqueeze(at)).squeeze(at)
        losses = torch.where(mine, -picked * weights, 0)
        # Where others hold the classes, nobody alone may raise as one device does.
        losses = torch.where(is_class, losses, torch.nan)
        return losses if reduction == NONE else losses.sum(), weights.sum()

    return run


def _local_backward(local: LocalCall) -> Callable[..., Any] | None:
    start = _own_classes(local.inputs[1])
    if start is None:
        return None

    def run(
        grad: Tensor,
        values: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignored: int,
        total_weight: Tensor,
    ) -> Tensor:
        at = _class_dim(values.ndim)
        made = torch.zeros_like(values)
        if values.shape[at] == 0:
            return made
        mine, index, weights = _targets(values, target, weight, start, ignored)
        scale = grad / total_weight if reduction == MEAN else grad
        slopes = torch.where(mine, -weights * scale, 0)  # the scale is infinite if none counts
        return made.scatter_(at, index.unsqueeze(at), slopes.unsqueeze(at))

    return run


def _targets(
    values: Tensor, target: Tensor, weight: Tensor | None, start: int, ignored: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which targets are classes of this rank, their places here and their weights.

    The others are at place 0 and weigh nothing.
    """
    count = values.shape[_class_dim(values.ndim)]
    index = target.long() - start
    mine = (index >= 0) & (index < count) & (target != ignored)
    index = torch.where(mine, index, 0)
    if weight is None or count == 0:
        return mine, index, mine.to(values.dtype)
    return mine, index, torch.where(mine, weight[index], 0)


def _nll_loss(op: Any) -> Decomposition:
    def run(
        values: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
    ) -> Any:
        if reduction == NONE:
            return NotImplemented
        low = is_low(values.dtype)
        if reduction == SUM and not low:
            return NotImplemented
        total, count = op(single_if_low(values), target, single_if_low(weight), SUM, ignore_index)
        result = total / count if reduction == MEAN else total
        return result.to(values.dtype), count.to(values.dtype)

    return run


for _op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
    decomposition(_op)(_nll_loss(_op))
