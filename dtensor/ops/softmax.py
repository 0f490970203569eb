"""Softmax and its kin: the dims must be whole, or two small reductions cross those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .engine.dims import dims_of, without
from .engine.dtypes import accumulator, is_inexact
from .engine.factors import Factors
from .engine.forms import operators
from .engine.primitives import cut_axes, is_cut, reduced, replicated, with_replicas
from .engine.rules import along_whole_dims, over_whole_dims
from .engine.table import OpCall, Rule, decomposition, meta, rule

aten = torch.ops.aten


rule(*operators(aten, "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"))(
    along_whole_dims
)

meta(aten._log_softmax.default)(aten._softmax.default)
# Kernels lay it in rows; without data torch lays it as the gradient that comes.
meta(aten._log_softmax_backward_data.default)(aten._softmax_backward_data.default)


@rule(aten._masked_softmax.default, aten._masked_softmax_backward.default)
def masked_softmax_rule(call: OpCall) -> Rule:
    """Softmax with a mask of the same shape, or of another (by its type) on whole tensors."""
    (source, *others, mask), dim = call.specs, call.arg("dim")
    dims, _ = without(source.ndim, -1 if dim is None else dim)
    if source.shape != mask.shape:
        dims = (None,) * source.ndim
    mask_dims = dims if mask.ndim == source.ndim else (None,) * mask.ndim
    inputs = (dims,) * (1 + len(others))
    return Factors(call, (*inputs, mask_dims), (dims,))


@meta(aten._masked_softmax.default, aten._masked_softmax_backward.default)
def masked_softmax_meta(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty tensor like the first."""
    return torch.empty_like(tensor)


rule(aten.logsumexp.default)(over_whole_dims)


def _maximum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the maximum on all ranks."""
    return replicated(tensor.amax(dims, keepdim=True), cut_axes(tensor, dims))


def _exponentials(tensor: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return ``exp`` of a tensor and its sum on all ranks."""
    values = tensor.exp()
    return values, replicated(values.sum(dims, keepdim=True), cut_axes(tensor, dims))


@decomposition(aten.logsumexp.default)
def logsumexp(tensor: Tensor, dim: Sequence[int], keepdim: bool = False) -> Any:
    """Return the logarithm of a sum of exponentials."""
    dims = dims_of(tensor, dim)
    if not is_cut(tensor, dims):
        return NotImplemented
    result = tensor.dtype if is_inexact(tensor.dtype) else torch.get_default_dtype()
    if result.is_complex:
        return NotImplemented
    values = reduced(tensor.to(accumulator(result)))
    top = _maximum(values, dims)
    top = top.masked_fill(top.isinf(), 0)
    _, total = _exponentials(values - top, dims)
    logs = (total.log() + top).to(result)
    return logs if keepdim else logs.squeeze(dims)


def softmax(tensor: Tensor, dim: int, half_to_float: bool, *, is_log: bool) -> Any:
    """Return the softmax or its logarithm; every rank keeps its part."""
    dims = dims_of(tensor, dim)
    if not is_cut(tensor, dims) or not tensor.is_floating_point():
        return NotImplemented
    values = reduced(tensor.to(accumulator(tensor.dtype)))
    shifted = values - _maximum(values, dims)
    powers, total = _exponentials(shifted, dims)
    made = shifted - total.log() if is_log else powers / total
    # Kernels lay values in rows, whatever the order of the input.
    return made.to(torch.float32 if half_to_float else tensor.dtype).contiguous()


decomposition(aten._softmax.default)(partial(softmax, is_log=False))
decomposition(aten._log_softmax.default)(partial(softmax, is_log=True))


@decomposition(aten._safe_softmax.default)
def safe_softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Return the softmax, and 0 where all is minus infinity."""
    values = tensor if dtype is None else tensor.to(dtype)
    nothing = (values == float("-inf")).all(dim, keepdim=True)
    return values.softmax(dim).masked_fill(nothing, 0)


@with_replicas
def softmax_backward(
    grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype, *, is_log: bool
) -> Any:
    """Return the gradient of the input of a softmax or its logarithm."""
    dims = dims_of(output, dim)
    if not (is_cut(output, dims) or is_cut(grad, dims)):
        return NotImplemented
    wide = accumulator(output.dtype)
    output, grad = output.to(wide), grad.to(wide)
    terms = reduced(grad) if is_log else grad * output
    total = replicated(terms.sum(dims, keepdim=True), cut_axes(terms, dims))
    made = terms - (output.exp() if is_log else output) * total
    return made.to(input_dtype).contiguous()


decomposition(aten._softmax_backward_data.default)(partial(softmax_backward, is_log=False))
decomposition(aten._log_softmax_backward_data.default)(partial(softmax_backward, is_log=True))
