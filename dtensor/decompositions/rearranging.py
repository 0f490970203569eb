"""Tensors repeated, rolled, turned and set side by side, by views, slices and joins."""

# pyright: reportPrivateUsage=false
# `_spec` is a name that users of torch read; inside the package it is ours.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tensor.wrapper import Wrapper
from .table import decomposition

aten = torch.ops.aten


@decomposition(aten.repeat.default)
def repeat(tensor: Tensor, repeats: Sequence[int]) -> Tensor:
    """Return copies side by side: a new dim before each repeated one, expanded and joined."""
    lead = len(repeats) - tensor.ndim
    sizes = [1] * lead + list(tensor.shape)
    final = [count * size for count, size in zip(repeats, sizes, strict=True)]
    if 0 in final:
        return tensor.new_empty(final)
    apart, repeated = list[int](), list[int]()
    for count, size in zip(repeats, sizes, strict=True):
        apart += [size] if count == 1 else [1, size]
        repeated += [size] if count == 1 else [count, size]
    expanded = tensor.reshape(apart).expand(repeated)
    # No view: the result is written to as any other tensor is.
    return aten._unsafe_view.default(expanded.clone(memory_format=torch.contiguous_format), final)


@decomposition(aten.roll.default)
def roll(tensor: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Return both sides of a cut in the other order, where the dim is cut over one axis."""
    if not all(_is_cut_once(tensor, dim) for dim in dims) or len(dims) != len(shifts) or not dims:
        return NotImplemented
    for shift, dim in zip(shifts, dims, strict=True):
        size = tensor.shape[dim]
        count = shift % max(size, 1)
        tail, head = tensor.narrow(dim, size - count, count), tensor.narrow(dim, 0, size - count)
        tensor = torch.cat([tail, head], dim)
    return tensor


def _is_cut_once(tensor: Tensor, dim: int) -> bool:
    return isinstance(tensor, Wrapper) and len(tensor._spec.layout.splits[dim]) == 1


@decomposition(aten.rot90.default)
def rot90(tensor: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Return a tensor turned by quarters: flipped, and its two dims exchanged if it is odd."""
    first, second = dims
    turns = k % 4
    if turns == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    if turns == 2:
        return tensor.flip(first, second)
    return tensor.flip(second if turns == 1 else first).transpose(first, second)


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
