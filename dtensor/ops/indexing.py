"""Picking and placing elements by index tensors.

The dims of index tensors and those that are not indexed pass through. Where an indexed dim is
sharded, each rank picks what it has, zero terms elsewhere, and writes what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import REDUCE_OPS
from ..mesh.spec import DTensorSpec
from ..tensor.schemas import base_name
from .engine.factors import LINEAR_OPS, Dim, Dims, Factors
from .engine.owned import Span, never_empty, span_of
from .engine.table import LocalCall, OpCall, Rule, rule
from .slicing import bytes_to_reduce
from .views import all_dims, whole

aten = torch.ops.aten


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def indexed(call: OpCall) -> Rule | None:
    """Elements by tensors of indices for some dims."""
    if _has_masks(call.specs[1:]):
        return None
    source, first = call.specs[0], call.outputs[0]
    picked = _picked_dims(call.args[1])
    dims = all_dims(source.ndim)
    block = _block(call.specs[1:], source.ndim)
    at = _position(picked)
    rest: Dims = tuple(dim for i, dim in enumerate(dims) if i not in picked)
    return Rule(
        rows=Factors(
            call=call,
            inputs=(dims, *_aligned(call.specs[1:], block)),
            outputs=((*rest[:at], *block, *rest[at:]),),
            reduce=dict.fromkeys(picked, "sum"),
            reduce_bytes=dict.fromkeys(picked, bytes_to_reduce(source, first)),
            linear=(frozenset({0}),),
            linear_ops=REDUCE_OPS,
        ),
        local=_local_index,
    )


@rule(
    aten.index_put.default,
    aten._index_put_impl.default,
    aten._unsafe_index_put.default,
)
def index_put(call: OpCall) -> Rule | None:
    """Elements replaced or added to at tensors of indices for some dims."""
    if _has_masks(call.specs[1:-1]):
        return None
    source, values = call.specs[0], call.specs[-1]
    picked = _picked_dims(call.args[1])
    adds = bool(call.arg(3, "accumulate", False))
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
    return Rule(
        rows=Factors(
            call=call,
            inputs=(dims, *_aligned(indices, block), tuple(valued)),
            outputs=(dims,),
            reduce={dim.factor: "sum" for dim in block if dim},
            addends=frozenset({0}),
            linear=(frozenset({0, last}),),
            linear_ops=LINEAR_OPS if adds else REDUCE_OPS,
        ),
        local=_local_index_put,
    )


@rule(aten.index_select.default)
def index_select(call: OpCall) -> Rule:
    """Elements by indices into one dim."""
    source, first, index = call.specs[0], call.outputs[0], call.specs[1]
    if not source.ndim:
        return whole(call)
    dim = call.args[1] % source.ndim
    dims = all_dims(source.ndim)
    found = Dim(source.ndim)
    return Rule(
        rows=Factors(
            call=call,
            inputs=(dims, (found,) * index.ndim),
            outputs=((*dims[:dim], found if index.ndim else None, *dims[dim + 1 :]),),
            reduce={dim: "sum"},
            reduce_bytes={dim: bytes_to_reduce(source, first)},
            linear=(frozenset({0}),),
            linear_ops=REDUCE_OPS,
        ),
        local=_local_index_select,
    )


@rule(
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_reduce.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
)
def index_write(call: OpCall) -> Rule:
    """One dim written at indices into it."""
    source, index, values = call.specs[0], call.specs[1], call.specs[2:]
    if not source.ndim or any(spec.ndim not in (0, source.ndim) for spec in values):
        return whole(call)
    dim = call.args[1] % source.ndim
    dims = all_dims(source.ndim)
    name = base_name(call.op)
    found = Dim(source.ndim) if name == "index_add" and index.ndim else None
    part = (*dims[:dim], found, *dims[dim + 1 :])
    ops = {"index_add": LINEAR_OPS, "index_copy": REDUCE_OPS}.get(name, ())
    return Rule(
        rows=Factors(
            call=call,
            inputs=(
                dims,
                (found,) * index.ndim,
                *(part if spec.ndim else () for spec in values),
            ),
            outputs=(dims,),
            reduce={found.factor: "sum"} if found else {},
            addends=frozenset({0}),
            linear=(frozenset({0, 2}),) if ops else (),
            linear_ops=ops,
        ),
        local=_local_index_write,
    )


@rule(
    aten.masked_scatter.default,
    aten.masked_scatter_backward.default,
    aten.nonzero_static.default,
)
def in_order(call: OpCall) -> Rule:
    """Elements in the order of those that a mask selects: everything must be whole."""
    return whole(call)


def _has_masks(indices: Sequence[DTensorSpec]) -> bool:
    return any(spec.dtype in (torch.bool, torch.uint8) for spec in indices)


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
    picked = _picked_dims(local.call.args[1])
    spans = [span_of(local.inputs[0], dim) for dim in picked]
    return [span for span in spans if span]


def _local_index(local: LocalCall) -> Callable[..., Any] | None:
    spans, picked = _spans(local), _picked_dims(local.call.args[1])
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
    spans, picked = _spans(local), _picked_dims(local.call.args[1])
    if not spans:
        return None
    at, op = _position(picked), local.op

    def run(tensor: Tensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any) -> Tensor:
        located, kept = _located(indices, spans)
        for span in spans:  # what lies in no part is left to the operator to refuse
            kept = kept | (located[span.dim] == span.size)
        kept, *given = torch.broadcast_tensors(kept, *(i for i in located if i is not None))
        own = iter([index[kept] for index in given])
        shape = [n for dim, n in enumerate(tensor.shape) if dim not in picked]
        shape[at:at] = kept.shape
        own_values = values.expand(shape)[(*(slice(None),) * at, kept)]
        return op(tensor, [i if i is None else next(own) for i in located], own_values, *rest)

    return run


def _local_index_select(local: LocalCall) -> Callable[..., Any] | None:
    source = local.inputs[0]
    dim = local.call.args[1] % max(source.ndim, 1)
    span = span_of(source, dim)
    if span is None:
        return None
    after = source.ndim - dim - 1

    def run(tensor: Tensor, _: int, index: Tensor) -> Tensor:
        located, inside = span.find(index.reshape(-1))
        found = never_empty(tensor, [span]).index_select(dim, located)
        return found.masked_fill(~inside[(..., *(None,) * after)], 0)

    return run


def _local_index_write(local: LocalCall) -> Callable[..., Any] | None:
    source = local.inputs[0]
    dim = local.call.args[1] % max(source.ndim, 1)
    span, op = span_of(source, dim), local.op
    if span is None:
        return None

    def run(tensor: Tensor, _: int, index: Tensor, value: Any, *rest: Any, **kwargs: Any) -> Tensor:
        places, located = span.keep(index.reshape(-1))
        if isinstance(value, Tensor) and value.ndim:
            value = value.index_select(dim, places)
        return op(tensor, dim, located, value, *rest, **kwargs)

    return run
