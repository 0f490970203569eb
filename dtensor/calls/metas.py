"""Operators run on tensors without data, for the shapes, strides and dtypes of their results.

No tensor of the call takes part, plain ones included: an operator that writes would write twice.

Torch's functions for that are written in Python for pointwise operators, and the first call of one
imports its compiler, which takes seconds. Where the strides of the result are plain to see, one
run on new tensors of no elements tells the rest, and sooner. What was found is remembered, for all
meshes and placements alike: results without data depend on the global tensors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm.caches import Cache
from ..geometry.box import row_major_strides
from ..mesh.spec import DTensorSpec, TensorMeta
from ..ops import rule_maker
from ..ops.engine.kernel_dtypes import kernel_dtypes, refuse_dtypes
from ..ops.engine.kernel_strides import kernel_strides
from ..ops.engine.table import METAS
from ..ops.pointwise import pointwise_rule
from ..tensor.arguments import collect_tensors, substituted
from ..tensor.schemas import Op, is_foreach, is_in_place, is_pointwise, is_random
from ..torch_private import schema_of
from .binding import Bound

aten = torch.ops.aten

Metas = tuple[TensorMeta | None, ...]
"""Global metadata of every output; None for one that is no tensor."""

MAX_METAS = 4096
"""Calls of which the metadata of results is remembered."""

_UNKNOWN: Any = object()


def output_metas(bound: Bound) -> Metas | None:
    """Return the global metadata of every output, or None where it depends on values."""
    key = (bound.mesh.device_type, _without_layout(bound.key))
    found = _known.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        found = _find_metas(bound)
        _known.put(key, found)
    return found


_known: Cache[tuple[Any, ...], Metas | None] = Cache("metas", MAX_METAS)


def _without_layout(part: Any) -> Any:
    """Return a part of a call's key that is the same for all meshes and placements."""
    if isinstance(part, DTensorSpec):
        return part.tensor_meta
    if isinstance(part, tuple):
        return tuple([_without_layout(item) for item in part])
    return part


def _find_metas(bound: Bound) -> Metas | None:
    op = bound.call.op
    empties = [
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        for leaf in bound.leaves
    ]
    meta_args, meta_kwargs = bound.call.without_data(empties)
    return metas_of(op, meta_args, meta_kwargs, bound.mesh.device_type)


def metas_of(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Metas | None:
    """Return the metadata of what ``op`` returns on a device for tensors like these of meta."""
    try:
        result = run_without_data(op, args, kwargs)
    except NotImplementedError:
        return None
    if result is None and is_in_place(op):
        result = args[0]
    refuse_dtypes(op, args, kwargs, device)
    listed = list(result) if isinstance(result, list | tuple) else [result]
    dtypes = kernel_dtypes(op, args, kwargs, device) or (None,) * len(listed)
    pointwise = rule_maker(op) is pointwise_rule and not is_foreach(op) and not is_random(op)
    strides = kernel_strides(op, args, kwargs, listed, device, is_pointwise=pointwise)
    return tuple(
        [
            TensorMeta(out.shape, stride or out.stride(), dtype or out.dtype)
            if isinstance(out, Tensor)
            else None
            for out, dtype, stride in zip(listed, dtypes, strides, strict=True)
        ]
    )


def run_without_data(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what ``op`` returns for tensors of the meta device."""
    found = _pointwise(op, args, kwargs) if is_pointwise(op) and not kwargs else None
    return METAS.get(op, op)(*args, **kwargs) if found is None else found


def _pointwise(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the result, or None where something about it is not as usual."""
    given: list[Tensor] = []
    collect_tensors(args, given)
    if op.is_view or (schema_of(op).is_mutable and not is_in_place(op)):
        return None
    if not given or (any(0 in tensor.shape for tensor in given) and not is_in_place(op)):
        return None
    try:
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in given])
        # Dims of size 1 stay only where they broadcast, so numbers alone have an element.
        small_args, _ = substituted(args, kwargs, [_small(tensor, shape) for tensor in given])
        small = op(*small_args)
    except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError):
        return None  # torch says in its own words what does not fit, of the shapes as they are
    if not isinstance(small, Tensor) or small.shape != (0,) * len(shape):
        return None
    if is_in_place(op):
        return given[0] if given[0].shape == shape else None
    strides = _strides(shape, given)
    if strides is None:  # which kernels and torch's functions agree on, but not on all dtypes
        strides = METAS.get(op, op)(*args).stride()
    return torch.empty_strided(shape, strides, dtype=small.dtype, device="meta")


def _small(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a new tensor that broadcasts to no elements as this one does to ``shape``."""
    ends = shape[len(shape) - tensor.ndim :]
    sizes = [int(own == 1 != end) for own, end in zip(tensor.shape, ends, strict=True)]
    return torch.ones(sizes, dtype=tensor.dtype, device="cpu")


def _strides(shape: torch.Size, given: list[Tensor]) -> tuple[int, ...] | None:
    """Return the strides of the result where all tensors lie in row-major order, or all alike."""
    if all(map(_is_row_major, given)):
        return row_major_strides(shape)
    first = given[0]
    alike = all(t.shape == shape and t.stride() == first.stride() for t in given)
    # In the order of their strides the dims must leave no gaps and share no memory.
    ordered = sorted(zip(first.stride(), first.shape, strict=True))
    expected = 1
    for stride, size in ordered:
        if size < 2 or stride != expected:
            return None
        expected *= size
    return first.stride() if alike else None


def _is_row_major(tensor: Tensor) -> bool:
    """Whether the elements lie in row-major order, but for dims that were expanded."""
    usual = row_major_strides(tensor.shape)
    return all(own in (0, one) for own, one in zip(tensor.stride(), usual, strict=True))
