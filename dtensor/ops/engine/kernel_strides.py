"""Strides of what kernels return, asked of the kernels themselves.

Torch's functions for tensors without data lay some results otherwise than its kernels do, where the
inputs do not lie in rows, or one does and another does not. A view of the result would then be
refused, or be a copy, and not on one device. So the kernel runs once on stand-ins of two indices a
dim that lie in the same order, never on tensors of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ...geometry.box import row_major_strides
from ...tensor.arguments import collect_tensors, substituted
from ...tensor.schemas import Op
from ...torch_private import has_modes, outside_modes, schema_of
from .kernel_dtypes import has_device

_OPS: set[Op] = set()


def strides_by_kernel(*ops: Op) -> None:
    """Register operators that are not pointwise and take tensors of any size."""
    _OPS.update(ops)


def kernel_strides(
    op: Op,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: Sequence[Any],
    device: str,
    *,
    is_pointwise: bool,
) -> list[tuple[int, ...] | None]:
    """Return the strides of results without data as the kernel of a device lays them.

    None for one that torch lays right, or that is no tensor.
    """
    nothing: list[tuple[int, ...] | None] = [None] * len(results)
    # An operator of a user is not run for this.
    is_asked = op in _OPS or (is_pointwise and op.namespace == "aten")
    if not is_asked or op.is_view or schema_of(op).is_mutable:
        return nothing
    given: list[Tensor] = []
    collect_tensors([*args, *kwargs.values()], given)
    if all(t.is_contiguous() for t in given) or any(0 in t.shape for t in given):
        return nothing
    if not has_device(device):
        return nothing
    with outside_modes() if has_modes() else nullcontext():
        ones = [_stand_in(tensor, device) for tensor in given]
        small_args, small_kwargs = substituted(args, kwargs, ones)
        try:
            made = op(*small_args, **small_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError):
            return nothing  # it refuses the values of stand-ins, or has no kernel here
    listed = cast("Sequence[Any]", made if isinstance(made, list | tuple) else [made])
    return [_as_laid(one, small) for one, small in zip(results, listed, strict=True)]


def _stand_in(tensor: Tensor, device: str) -> Tensor:
    """Return ones that lie in the order of a tensor, without gaps."""
    sizes = [min(size, 2) for size in tensor.shape]
    strides = _dense(sizes, tensor.stride())
    pairs = zip(strides, tensor.stride(), strict=True)
    made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=device).fill_(1)
    return made.as_strided(sizes, [stride if own else 0 for stride, own in pairs])


def _as_laid(result: Any, small: Any) -> tuple[int, ...] | None:
    if not isinstance(result, Tensor) or not isinstance(small, Tensor):
        return None
    if small.ndim != result.ndim or 0 in small.stride():
        return None
    found = _dense(result.shape, small.stride())
    triples = zip(found, result.stride(), result.shape, strict=True)
    return found if any(own != torchs and size > 1 for own, torchs, size in triples) else None


def _dense(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps for dims in the order of other strides."""
    dims = sorted(range(len(sizes)), key=lambda dim: (-order[dim], dim))
    steps = row_major_strides(tuple([sizes[dim] for dim in dims]))
    found = [0] * len(dims)
    for dim, step in zip(dims, steps, strict=True):
        found[dim] = step
    return tuple(found)
