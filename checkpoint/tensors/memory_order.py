"""The order of the dims of a tensor in memory, where it is not row-major.

Kernels go by it, and round otherwise for another one: state of an optimizer that comes back with
its values alone does not go on bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def memory_order(tensor: Any) -> tuple[int, ...] | None:
    """Return the dims of a dense tensor from the slowest to the fastest; None for row-major ones.

    None for tensors with gaps or overlaps too, which are views of larger ones.

    >>> memory_order(torch.empty(2, 3).t()), memory_order(torch.empty(2, 3))
    ((1, 0), None)
    """
    if tensor.ndim < 2 or tensor.is_contiguous():
        return None
    sizes, strides = tuple(tensor.shape), tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return None
        step *= sizes[dim]
    return None if order == tuple(range(tensor.ndim)) else order


def strides_in_order(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides of a dense tensor with its dims in some order.

    >>> strides_in_order((2, 3), (1, 0)), strides_in_order((2, 3), None)
    ((1, 2), (3, 1))
    """
    strides, step = [1] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def empty_in_order(
    shape: Sequence[int], order: Sequence[int] | None, dtype: torch.dtype, device: Any
) -> torch.Tensor:
    """Return a new tensor with its dims in some order in memory."""
    strides = strides_in_order(shape, order)
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)
