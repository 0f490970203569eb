"""Indexing by masks and by places in the flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.schemas import Op, is_in_place
from .table import DECOMPOSITIONS, Decomposition, decomposition

aten = torch.ops.aten

Indices = Sequence[Tensor | None]


@decomposition(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(tensor: Tensor, indices: Indices) -> Tensor:
    """Return what masks select, by the places where they are true."""
    if not _has_masks(indices):
        return NotImplemented
    return aten.index.Tensor(tensor, _without_masks(tensor, indices))


def _index_put(op: Op) -> Decomposition:
    writes = is_in_place(op)

    def run(tensor: Tensor, indices: Indices, values: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        if not _has_masks(indices):
            return NotImplemented
        adds = rest[0] if rest else kwargs.get("accumulate", False)
        mask = None if adds else _single_mask(tensor, indices, values)
        if mask is None:
            return op(tensor, _without_masks(tensor, indices), values, *rest, **kwargs)
        made = torch.where(mask, values, tensor)
        return tensor.copy_(made) if writes else made

    return run


for _op in (
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
):
    DECOMPOSITIONS[_op] = _index_put(_op)


@decomposition(aten.take.default)
def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return elements by their places in the flat tensor."""
    return aten.index.Tensor(tensor.reshape(-1), [index])


def _put(tensor: Tensor, index: Tensor, source: Tensor, accumulate: bool) -> Tensor:
    flat = tensor.reshape(-1)
    made = flat.index_put([index.reshape(-1)], source.reshape(-1), accumulate)
    return made.reshape(tensor.shape)


@decomposition(aten.put.default)
def put(tensor: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Return a tensor with other elements at places in the flat tensor."""
    return _put(tensor, index, source, accumulate)


@decomposition(aten.put_.default)
def put_in_place(tensor: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write elements at places in the flat tensor."""
    return tensor.copy_(_put(tensor, index, source, accumulate))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _has_masks(indices: Indices) -> bool:
    return any(_is_mask(index) for index in indices)


def _single_mask(tensor: Tensor, indices: Indices, values: Tensor) -> Tensor | None:
    """Return a mask that is the only index, brought to the dims of the tensor.

    None where the values differ from one selected element to the next.
    """
    given = [index for index in indices if index is not None]
    if len(given) != 1:
        return None
    mask, before = given[0].bool(), [index is None for index in indices].index(False)
    _require_fits(tensor, mask, before)
    num_after = tensor.ndim - before - mask.ndim
    return mask[(..., *(None,) * num_after)] if values.ndim <= num_after else None


def _without_masks(tensor: Tensor, indices: Indices) -> list[Tensor | None]:
    """Return indices with each mask replaced by the places where it is true, one per dim."""
    made: list[Tensor | None] = []
    for given in indices:
        if given is None or not _is_mask(given):
            made.append(given)
        else:
            _require_fits(tensor, given, len(made))
            made.extend(given.nonzero().unbind(1))
    return made


def _require_fits(tensor: Tensor, mask: Tensor, dim: int) -> None:
    if mask.shape != tensor.shape[dim : dim + mask.ndim]:
        raise IndexError(
            f"a mask of shape {list(mask.shape)} does not fit dims {dim} to {dim + mask.ndim - 1} "
            f"of a tensor of shape {list(tensor.shape)}"
        )
