"""Reductions in half precision: the terms of the ranks meet in single precision.

A rank's sum may overflow, and would be rounded, where the sum over all ranks on one device is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .pieces import cut_axes, dims_of, has_terms, is_low
from .table import Decomposition, decomposition

aten = torch.ops.aten


def _rounds_terms(tensor: Tensor, dim: Sequence[int] | int | None, dtype: torch.dtype) -> bool:
    if not is_low(dtype):
        return False
    return has_terms(tensor) or bool(cut_axes(tensor, dims_of(tensor, dim)))


def _in_single(op: Any, *, over_dims: bool) -> Decomposition:
    def run(
        tensor: Tensor,
        dim: Sequence[int] | int | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        result = tensor.dtype if dtype is None else dtype
        if not _rounds_terms(tensor, dim, result):
            return NotImplemented
        over = (dim, keepdim) if over_dims else ()
        return op(tensor, *over, dtype=torch.float32).to(result)

    return run


for _op in (aten.sum.default, aten.mean.default, aten.prod.default):
    decomposition(_op)(_in_single(_op, over_dims=False))

for _op in (aten.sum.dim_IntList, aten.mean.dim, aten.nansum.default, aten.prod.dim_int):
    decomposition(_op)(_in_single(_op, over_dims=True))
