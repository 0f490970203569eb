"""Batch norm over all ranks, in terms of sums over what they hold.

Torch has a dozen operators for it, which differ in the arguments that they have and in what they
return beside the values. All are one of two functions here, of arguments by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensor.schemas import Op
from ..torch_private import schema_of
from .engine.dtypes import accumulator
from .engine.forms import operators
from .engine.kernel_dtypes import dtypes_by_kernel, kernel_dtypes
from .engine.primitives import all_distributed, reduced
from .engine.rules import needs_whole
from .engine.table import Decomposition, OpCall, Rule, decomposition, meta, rule
from .variance import moments

aten = torch.ops.aten


@rule(aten.native_batch_norm.default)
def batch_norm_rule(call: OpCall) -> Rule | None:
    """Batch norm of whole tensors, which is left to the operator."""
    # In evaluation its means are empty, of which torch without data does not know.
    return needs_whole(call) if call.arg("training") else None


rule(aten.native_batch_norm_backward.default)(needs_whole)


@meta(aten.native_batch_norm.default)
def batch_norm_meta(tensor: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return empty results, values in the order that kernels lay them."""
    values, *others = aten.native_batch_norm.default(tensor, *args)
    return _as_kernels_lay(values), *others


@meta(aten.native_batch_norm_backward.default)
def batch_norm_backward_meta(grad: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Return empty gradients, that of the input in the order that kernels lay it."""
    first, *others = aten.native_batch_norm_backward.default(grad, *args)
    return None if first is None else _as_kernels_lay(first), *others


def _dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims that the values of a channel lie along."""
    return tuple(d for d in range(tensor.ndim) if d != 1)


def _along_channels(channels: Tensor, tensor: Tensor) -> Tensor:
    """Return one value per channel in a shape that broadcasts to ``tensor``."""
    return channels.reshape([1 if d != 1 else -1 for d in range(tensor.ndim)])


def _as_kernels_lay(values: Tensor) -> Tensor:
    """Return values row by row, or by channels last where they are, whatever the input's order."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(values.ndim)
    if form is not None and values.is_contiguous(memory_format=form):
        return values
    return values.contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """The arguments of one call, by the names that most of the operators have for them."""

    input: Tensor
    weight: Tensor | None
    training: bool
    eps: float
    bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    momentum: float = 0.0
    grad_out: Tensor | None = None
    save_mean: Tensor | None = None
    save_invstd: Tensor | None = None
    output_mask: Sequence[bool] = (True, True, True)
    kept: torch.dtype | None = None
    """Dtype of mean and inverse deviation as they are returned; None for that of the sums."""

    @property
    def running(self) -> tuple[Tensor, Tensor] | None:
        """Mean and inverse deviation as they are running, where these are to be used."""
        if self.training or self.running_mean is None or self.running_var is None:
            return None
        wide = accumulator(self.input.dtype)
        return self.running_mean.to(wide), (self.running_var.to(wide) + self.eps).rsqrt()

    def normalised(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return the values, given mean and inverse deviation per channel."""
        tensor, weight, bias = self.input, self.weight, self.bias
        values = tensor.to(accumulator(tensor.dtype)) - _along_channels(mean, tensor)
        values = values * _along_channels(scale if weight is None else scale * weight, tensor)
        if bias is not None:
            values = values + _along_channels(bias, tensor)
        return _as_kernels_lay(values.to(tensor.dtype))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, mean and inverse deviation per channel; updates what is running."""
        running = self.running
        if running is not None:
            empty = self.input.new_empty([0], dtype=self.kept or running[0].dtype)
            return self.normalised(*running), empty, empty.clone()
        mean, total, count = moments(self.input, _dims(self.input), keepdim=False)
        total = reduced(total)
        scale = (total / count + self.eps).rsqrt()
        for kept, value in ((self.running_mean, mean), (self.running_var, total / (count - 1))):
            if kept is not None:
                kept.mul_(1 - self.momentum).add_(value.to(kept.dtype), alpha=self.momentum)
        returned = self.kept or mean.dtype
        return self.normalised(mean, scale), mean.to(returned), scale.to(returned)

    def backward(self, grad: Tensor) -> Any:
        """Return the gradients of the input, of the weight and of the bias."""
        # Of the terms of a Partial, which may be large, small differences are scaled up twice.
        tensor, weight = reduced(self.input), self.weight
        wide, dims = accumulator(tensor.dtype), _dims(tensor)
        mean, scale = self.running or (self.save_mean, self.save_invstd)
        if mean is None or scale is None:
            return NotImplemented
        given = reduced(grad.to(wide))
        normal = (tensor.to(wide) - _along_channels(mean, tensor)) * _along_channels(scale, tensor)
        grad_weight, grad_bias = reduced((given * normal).sum(dims)), reduced(given.sum(dims))
        grad_input = None
        if self.output_mask[0]:
            if self.training:
                count = math.prod(tensor.shape[d] for d in dims)
                shared = normal * _along_channels(grad_weight / count, tensor)
                given = given - shared - _along_channels(grad_bias / count, tensor)
            scaled = scale if weight is None else scale * weight
            grad_input = _as_kernels_lay((given * _along_channels(scaled, tensor)).to(tensor.dtype))
        dtype = tensor.dtype if weight is None else weight.dtype
        return (
            grad_input,
            grad_weight.to(dtype) if self.output_mask[1] else None,
            grad_bias.to(dtype) if self.output_mask[2] else None,
        )


_NAMES = {
    "epsilon": "eps",
    "exponential_average_factor": "momentum",
    "grad_output": "grad_out",
    "save_var": "save_invstd",
    "train": "training",
    "update": "training",
}
"""What some operators call their arguments, by what most of them do."""

_RESERVES = ("reserve", "reserveSpace")
"""Arguments for memory that only kernels of a vendor need."""


def _named(op: Op, args: Sequence[Any]) -> dict[str, Any]:
    """Return arguments by their usual names."""
    given = {str(a.name): value for a, value in zip(schema_of(op).arguments, args, strict=True)}
    return {_NAMES.get(name, name): value for name, value in given.items() if name not in _RESERVES}


def _forward(op: Op, *, training: bool | None = None) -> Decomposition:
    """Return a batch norm; ``training`` says what an operator without that argument does."""
    num_results = len(schema_of(op).returns)

    def run(*args: Any) -> Any:
        args = tuple(all_distributed(*args))
        given = _named(op, args)
        if training is not None:
            given["training"] = training
        new: tuple[Tensor, ...] = ()
        if num_results == 5:  # new running values, in place of updated ones
            new = given["running_mean"].clone(), given["running_var"].clone()
            given["running_mean"], given["running_var"] = new
        dtypes = kernel_dtypes(op, args, {}, given["input"].device.type)
        call = _Arguments(**given, kept=dtypes[1] if dtypes else None)
        if num_results == 4:  # a reserve, of which there is none
            new = (call.input.new_empty([0], dtype=torch.uint8),)
        return *call.forward(), *new

    return run


def _backward(op: Op) -> Decomposition:
    def run(*args: Any) -> Any:
        given: dict[str, Any] = {"training": True, **_named(op, all_distributed(*args))}
        call = _Arguments(**given)
        return NotImplemented if call.grad_out is None else call.backward(call.grad_out)

    return run


_FORWARD = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats"
    " _native_batch_norm_legit_functional cudnn_batch_norm"
)
"""Operators that are told whether they train."""

_WITHOUT_FLAG = "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update"

_BACKWARD = "native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward"

dtypes_by_kernel(*operators(aten, f"{_FORWARD} {_WITHOUT_FLAG} {_BACKWARD}"))

for _op in operators(aten, _FORWARD):
    decomposition(_op)(_forward(_op))

for _op, _training in (
    (aten._native_batch_norm_legit_no_training.default, False),
    (aten._batch_norm_with_update.default, True),
    (aten._batch_norm_no_update.default, False),
):
    decomposition(_op)(_forward(_op, training=_training))

for _op in operators(aten, _BACKWARD):
    decomposition(_op)(_backward(_op))
