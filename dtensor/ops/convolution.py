"""Convolutions: batches and channels may be split, the dims that the window slides over may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mesh.spec import DTensorSpec
from .engine.factors import FIRST, Dim, Dims, Factors
from .engine.forms import Form, register_forms
from .engine.local_kernels import lacks_elements, zeros_of_nothing
from .engine.table import LocalCall, LocalMaker, OpCall, Rule, rule

aten = torch.ops.aten

_BATCH, _GROUP = 0, 1


@rule(aten.convolution.default)
def convolution_rule(call: OpCall) -> Rule | None:
    """A convolution: split input channels leave a Partial sum, in which the bias counts once."""
    data, weight = call.specs[:2]
    if data.ndim != weight.ndim:
        return None
    transposed, groups = call.arg("transposed"), call.arg("groups")
    if groups == 1:
        kernel = "co_" if transposed else "oc_"
        return Form(f"nc_, {kernel}, +o -> no_", ("02", "12"), _local_forward).rule(call)
    ins, outs = data.shape[1] // groups, call.output_shape[1] // groups
    return _grouped(call, ("in", "weight"), ("out",), ins, outs, _local_forward)


@rule(aten.convolution_backward.default)
def convolution_backward_rule(call: OpCall) -> Rule | None:
    """Its gradients: that of the input sums over output channels, the others over the batch."""
    grad, data, weight = call.specs
    if data.ndim != weight.ndim:
        return None
    transposed, groups = call.arg("transposed"), call.arg("groups")
    if groups == 1:
        kernel = "co_" if transposed else "oc_"
        text = f"no_, nc_, {kernel} -> nc_, {kernel}, o(c)"
        return Form(text, ("0",), _local_backward).rule(call)
    ins, outs = data.shape[1] // groups, grad.shape[1] // groups
    outputs = ("in", "weight", "bias")
    return _grouped(call, ("out", "in", "weight"), outputs, ins, outs, _local_backward)


def _grouped(
    call: OpCall,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    ins: int,
    outs: int,
    local: LocalMaker,
) -> Rule:
    """Return a rule that splits the batch and whole groups of ``ins`` to ``outs`` channels."""
    is_backward = len(outputs) > 1
    transposed = call.arg("transposed")
    units = {"in": outs, "out": ins, "bias": ins, "weight": outs if transposed else ins}

    def dims(role: str, ndim: int) -> Dims:
        channel = Dim(_GROUP, max(units[role], 1))
        lead = (channel,) if role in ("weight", "bias") else (Dim(_BATCH), channel)
        return (*lead, *(None,) * (ndim - len(lead)))

    roles = (*inputs, "bias")[: len(call.specs)]
    return Factors(
        call,
        inputs=tuple(dims(r, spec.ndim) for r, spec in zip(roles, call.specs, strict=True)),
        outputs=tuple(
            dims(role, len(meta.shape)) if meta else ()
            for role, meta in zip(outputs, call.outputs, strict=True)
        ),
        reduce={_BATCH: "sum"} if is_backward else {},
        linear=FIRST if is_backward else (),
        blocks={_GROUP: max(ins * outs, 1)},
        local=local,
    )


def _local_groups(groups: int, whole: DTensorSpec, part: DTensorSpec) -> int:
    """Return how many groups this rank has, from a tensor whose channels are split with them."""
    return groups * part.local_shape[1] // max(whole.shape[1], 1) if groups > 1 else 1


def _local_forward(local: LocalCall) -> Callable[..., Any]:
    if lacks_elements(local):
        return _bias_only(local)
    call = local.call
    groups = _local_groups(call.arg("groups"), call.specs[0], local.inputs[0])

    def run(*args: Any) -> Tensor:
        return aten.convolution(*args[:8], groups)

    return run


def _bias_only(local: LocalCall) -> Callable[..., Any]:
    """Return what a rank without input or weight computes: its term of the bias."""
    shape = local.output_shape

    def run(data: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
        del weight
        made = data.new_zeros(shape)
        if bias is not None and made.numel():
            made += bias.view(-1, *(1,) * (len(shape) - 2))
        return made

    return run


def _local_backward(local: LocalCall) -> Callable[..., Any]:
    call, bias = local.call, local.outputs[2]
    empty = zeros_of_nothing(local)
    if empty is not None:
        return _bias_gradient_only(empty) if bias is not None else empty
    groups = _local_groups(call.arg("groups"), call.specs[1], local.inputs[1])

    def run(grad: Tensor, data: Tensor, weight: Tensor, sizes: Any, *args: Any) -> Any:
        if bias is not None:
            sizes = list(bias.local_shape)
        return aten.convolution_backward(grad, data, weight, sizes, *args[:5], groups, args[6])

    return run


def _bias_gradient_only(zeros: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a rank without input or weight computes: the bias may have a gradient."""

    def run(grad: Tensor, *args: Any) -> Any:
        of_data, of_weight, _ = zeros(grad, *args)
        return of_data, of_weight, grad.sum([0, *range(2, grad.ndim)])

    return run


register_forms(aten, {"conv_tbc": ".nc, .co, +o -> .no"})
