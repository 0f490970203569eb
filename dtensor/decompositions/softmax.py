"""Softmax and its kin along a dim that the mesh cuts: two small reductions, nothing gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .pieces import accumulator, cut_axes, dims_of, reduced, replicated
from .table import decomposition

aten = torch.ops.aten


def _is_cut(tensor: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether parts have to be combined; of nothing there is no maximum."""
    return bool(cut_axes(tensor, dims)) and all(tensor.shape[d] for d in dims)


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
    if not _is_cut(tensor, dims):
        return NotImplemented
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    result = tensor.dtype if inexact else torch.get_default_dtype()
    if result.is_complex:
        return NotImplemented
    values = reduced(tensor.to(accumulator(result)))
    top = _maximum(values, dims)
    top = top.masked_fill(top.isinf(), 0)
    _, total = _exponentials(values - top, dims)
    logs = (total.log() + top).to(result)
    return logs if keepdim else logs.squeeze(dims)


@decomposition(aten._softmax.default)
def softmax(tensor: Tensor, dim: int, half_to_float: bool) -> Any:
    """Return the softmax; every rank keeps its part."""
    dims = dims_of(tensor, dim)
    if not _is_cut(tensor, dims) or not tensor.is_floating_point():
        return NotImplemented
    values = reduced(tensor.to(accumulator(tensor.dtype)))
    values, total = _exponentials(values - _maximum(values, dims), dims)
    return (values / total).to(torch.float32 if half_to_float else tensor.dtype)


@decomposition(aten._log_softmax.default)
def log_softmax(tensor: Tensor, dim: int, half_to_float: bool) -> Any:
    """Return the logarithm of the softmax; every rank keeps its part."""
    dims = dims_of(tensor, dim)
    if not _is_cut(tensor, dims) or not tensor.is_floating_point():
        return NotImplemented
    values = reduced(tensor.to(accumulator(tensor.dtype)))
    shifted = values - _maximum(values, dims)
    _, total = _exponentials(shifted, dims)
    return (shifted - total.log()).to(torch.float32 if half_to_float else tensor.dtype)


@decomposition(aten._safe_softmax.default)
def safe_softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Return the softmax, and 0 where all is minus infinity."""
    values = tensor if dtype is None else tensor.to(dtype)
    nothing = (values == float("-inf")).all(dim, keepdim=True)
    return values.softmax(dim).masked_fill(nothing, 0)


@decomposition(aten._softmax_backward_data.default)
def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    """Return the gradient of the input of a softmax."""
    dims = dims_of(output, dim)
    if not (_is_cut(output, dims) or _is_cut(grad, dims)):
        return NotImplemented
    wide = accumulator(output.dtype)
    output = output.to(wide)
    terms = grad.to(wide) * output
    total = replicated(terms.sum(dims, keepdim=True), cut_axes(terms, dims))
    return (terms - output * total).to(input_dtype)


@decomposition(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    """Return the gradient of the input of the logarithm of a softmax."""
    dims = dims_of(output, dim)
    if not (_is_cut(output, dims) or _is_cut(grad, dims)):
        return NotImplemented
    wide = accumulator(output.dtype)
    grad = reduced(grad.to(wide))
    total = replicated(grad.sum(dims, keepdim=True), cut_axes(grad, dims))
    return (grad - output.to(wide).exp() * total).to(input_dtype)
