"""Picking and placing elements by index tensors and masks.

The dims of index tensors and those that are not indexed pass through. Where an indexed dim is
sharded, each rank picks what it has, zero terms elsewhere, and writes what it has. A mask stands
for the places where it is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import REDUCE_OPS
from ..mesh.spec import DTensorSpec
from ..tensor.schemas import Op, is_in_place
from .engine.dims import all_dims, without
from .engine.factors import LINEAR_OPS, Dim, Dims, Factors
from .engine.forms import operators
from .engine.gathered import on_gathered
from .engine.local_indices import Span, never_empty, span_of
from .engine.rules import needs_whole, picking
from .engine.table import Decomposition, LocalCall, OpCall, Rule, decomposition, rule

aten = torch.ops.aten


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_rule(call: OpCall) -> Rule | None:
    """Elements by tensors of indices for some dims."""
    if _has_masks(call.specs[1:]):
        return None
    ndim, picked = call.specs[0].ndim, _picked_dims(call.arg("indices"))
    at, block = _position(picked), _block(call.specs[1:], ndim)
    _, rest = without(ndim, *picked)
    inputs = (all_dims(ndim), *_aligned(call.specs[1:], block))
    return picking(call, inputs, (*rest[:at], *block, *rest[at:]), picked, _local_index)


@rule(*operators(aten, "index_put _index_put_impl _unsafe_index_put"))
def index_put_rule(call: OpCall) -> Rule | None:
    """Elements replaced or added to at tensors of indices for some dims."""
    if _has_masks(call.specs[1:-1]):
        return None
    source, values = call.specs[0], call.specs[-1]
    picked = _picked_dims(call.arg("indices"))
    adds = bool(call.arg("accumulate"))
    indices = call.specs[1:-1]
    dims, block = all_dims(source.ndim), _block(indices, source.ndim)
    at = _position(picked)
    rest = [i for i in range(source.ndim) if i not in picked]
    shape = [source.shape[i] for i in rest]
    shape[at:at] = _broadcast(indices)
    target: Dims = (*(dims[i] for i in rest[:at]), *block, *(dims[i] for i in rest[at:]))
    lead = max(len(shape) - values.ndim, 0)
    valued = [
        dim if size == shape[lead + i] else None
        for i, (dim, size) in enumerate(zip(target[lead:], values.shape, strict=False))
    ]
    if not adds:  # an element that occurs twice must be written by one rank
        block = (None,) * len(block)
        valued = [dim if dim in dims else None for dim in valued]
    last = len(call.specs) - 1
    return Factors(
        call,
        inputs=(dims, *_aligned(indices, block), tuple(valued)),
        outputs=(dims,),
        reduce={dim.factor: "sum" for dim in block if dim},
        addends=frozenset({0}),
        linear=(frozenset({0, last}),),
        linear_ops=LINEAR_OPS if adds else REDUCE_OPS,
        local=_local_index_put,
    )


@rule(*operators(aten, "masked_scatter masked_scatter_backward nonzero_static"))
def in_order_rule(call: OpCall) -> Rule:
    """Elements in the order of those that a mask selects: everything must be whole."""
    return needs_whole(call)


def _picked_dims(indices: Sequence[Any]) -> list[int]:
    return [dim for dim, index in enumerate(indices) if index is not None]


def _position(picked: Sequence[int]) -> int:
    """Return where the dims of the indices are in the result: in front unless side by side."""
    return picked[0] if picked[-1] - picked[0] == len(picked) - 1 else 0


def _broadcast(indices: Sequence[DTensorSpec]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(spec.shape for spec in indices)))


def _block(indices: Sequence[DTensorSpec], first: int) -> Dims:
    """Return the factors of the dims that the index tensors have together."""
    return tuple(Dim(first + i) for i in range(len(_broadcast(indices))))


def _aligned(indices: Sequence[DTensorSpec], block: Dims) -> tuple[Dims, ...]:
    shape = _broadcast(indices)
    return tuple(
        tuple(
            block[len(shape) - spec.ndim + i] if size == shape[len(shape) - spec.ndim + i] else None
            for i, size in enumerate(spec.shape)
        )
        for spec in indices
    )


def _spans(local: LocalCall) -> list[Span]:
    """Return this rank's part of every indexed dim that is not whole."""
    picked = _picked_dims(local.call.arg("indices"))
    spans = [span_of(local.inputs[0], dim) for dim in picked]
    return [span for span in spans if span]


def _local_index(local: LocalCall) -> Callable[..., Any] | None:
    spans, picked = _spans(local), _picked_dims(local.call.arg("indices"))
    if not spans:
        return None
    num_after = local.inputs[0].ndim - len(picked) - _position(picked)

    def run(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        located, inside = _located(indices, spans)
        picked = local.op(never_empty(tensor, spans), located)
        return picked.masked_fill(~inside[(..., *(None,) * num_after)], 0)

    return run


def _located(indices: Sequence[Tensor | None], spans: list[Span]) -> tuple[list[Any], Tensor]:
    """Return local indices, and the mask of elements that lie here along all dims."""
    located, masks = list(indices), list[Tensor]()
    for span in spans:
        index = indices[span.dim]
        if index is not None:
            located[span.dim], inside = span.find(index, wraps=True)
            masks.append(inside)
    inside = masks[0]
    for other in masks[1:]:
        inside = inside & other
    return located, inside


def _local_index_put(local: LocalCall) -> Callable[..., Any] | None:
    spans, picked = _spans(local), _picked_dims(local.call.arg("indices"))
    if not spans:
        return None
    at, op = _position(picked), local.op

    def run(tensor: Tensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any) -> Tensor:
        located, kept = _located(indices, spans)
        for span in spans:  # what lies in no part is left to the operator to refuse
            kept = kept | (located[span.dim] == span.nowhere)
        kept, *given = torch.broadcast_tensors(kept, *(i for i in located if i is not None))
        own = iter([index[kept] for index in given])
        shape = [n for dim, n in enumerate(tensor.shape) if dim not in picked]
        shape[at:at] = kept.shape
        own_values = values.expand(shape)[(*(slice(None),) * at, kept)]
        return op(tensor, [i if i is None else next(own) for i in located], own_values, *rest)

    return run


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
    decomposition(_op)(_index_put(_op))


@decomposition(aten.take.default)
def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return elements by their places in the flat tensor."""
    return aten.index.Tensor(tensor.reshape(-1), [index])


@decomposition(aten.put.default)
def put(tensor: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Return a tensor with other elements at places in the flat tensor."""
    flat = tensor.reshape(-1)
    made = flat.index_put([index.reshape(-1)], source.reshape(-1), accumulate).reshape(tensor.shape)
    # The values lie in memory in the order of those of the tensor.
    return made if tensor.is_contiguous() else torch.empty_like(tensor).copy_(made)


def _is_mask(index: Tensor | DTensorSpec | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _has_masks(indices: Sequence[Tensor | DTensorSpec | None]) -> bool:
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


on_gathered(aten.masked_select.default, aten.nonzero.default)
