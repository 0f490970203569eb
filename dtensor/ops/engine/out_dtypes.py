"""Operators with ``out=`` that compute in the dtype of the tensor that they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tensor.schemas import Op
from .table import Decomposition, decomposition


def computed_in_out_dtype(ops: Sequence[Op]) -> None:
    """Register ``out=`` forms whose ``dtype`` argument defaults to the dtype of ``out``.

    A result in the usual dtype that is cast afterwards has other values: sums of half precision are
    rounded, and those of small integers do not fit.
    """
    for op in ops:
        decomposition(op)(_with_dtype(op))


def computed_in_wider_out_dtype(ops: Sequence[Op]) -> None:
    """Register ``out=`` forms without a ``dtype`` argument that round to the dtype of ``out`` only.

    The tensor that is reduced is cast where that of ``out`` is the wider one.
    """
    for op in ops:
        decomposition(op)(_widened(op))


def _widened(op: Op) -> Decomposition:
    def run(tensor: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Any:
        wide = out.dtype.to_real()
        same = not tensor.is_floating_point() or not wide.is_floating_point
        if same or torch.promote_types(tensor.dtype, wide) != wide or wide == tensor.dtype:
            return NotImplemented
        return op(tensor.to(wide), *args, out=out, **kwargs)

    return run


def _with_dtype(op: Op) -> Decomposition:
    def run(*args: Any, out: Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        return NotImplemented if dtype else op(*args, dtype=out.dtype, out=out, **kwargs)

    return run
