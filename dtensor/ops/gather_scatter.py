"""Picking and placing elements by indices along one dim.

Where that dim is sharded, each rank picks what it has, zero terms elsewhere, and writes what it
has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import REDUCE_OPS
from ..mesh.spec import DTensorSpec
from ..tensor.schemas import base_name, is_in_place
from .engine.dims import all_dims, with_dim
from .engine.factors import LINEAR_OPS, Dim, Dims, Factors
from .engine.forms import operators
from .engine.local_indices import Span, never_empty, span_of
from .engine.rules import needs_whole, picking
from .engine.table import LocalCall, OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten.gather.default)
def gather_rule(call: OpCall) -> Rule:
    """Elements that are picked; a rank that does not have one has a zero term."""
    source, index = call.specs
    dim = call.arg("dim") % max(source.ndim, 1)
    if source.ndim != index.ndim or not source.ndim:
        return needs_whole(call)
    found = Dim(source.ndim)
    picked = _along(index, call, dim, found)
    inputs = (_along(source, call, dim, Dim(dim)), picked)
    return picking(call, inputs, picked, (dim,), _local_gather)


@rule(
    *operators(aten, "scatter.src scatter.value scatter.reduce scatter.value_reduce"),
    *operators(aten, "scatter_add scatter_reduce.two"),
)
def scatter_rule(call: OpCall) -> Rule:
    """Elements that are placed, each by the rank that has its place."""
    source = call.specs[0]
    dim = call.arg("dim") % max(source.ndim, 1)
    if any(spec.ndim != source.ndim for spec in call.specs) or not source.ndim:
        return needs_whole(call)
    adds = base_name(call.op) == "scatter_add"
    found = Dim(source.ndim) if adds and _same_size(call, dim) else None
    dims = _along(source, call, dim, Dim(dim))
    sources = frozenset({0, 2}) if len(call.specs) > 2 else frozenset[int]()
    ops = {"scatter_add": LINEAR_OPS, "scatter": REDUCE_OPS}.get(base_name(call.op), ())
    keeps_values = sources and call.arg("reduce") is None
    return Factors(
        call,
        inputs=(dims, *(_along(spec, call, dim, found) for spec in call.specs[1:])),
        outputs=(dims,),
        reduce={found.factor: "sum"} if found else {},
        addends=frozenset({0}),
        linear=(sources,) if keeps_values else (),
        linear_ops=ops,
        local=_local_scatter,
        positions=frozenset({dim}),
    )


def _same_size(call: OpCall, dim: int) -> bool:
    return len({spec.shape[dim] for spec in call.specs[1:]}) == 1


def _along(spec: DTensorSpec, call: OpCall, dim: int, own: Dim | None) -> Dims:
    """Return the dims of one tensor: where it is smaller than others it has their first steps."""
    extents = [max(sizes) for sizes in zip(*(s.shape for s in call.specs), strict=True)]
    return tuple(
        own if i == dim else Dim(i) if size == extents[i] else Dim(i, window=range(size))
        for i, size in enumerate(spec.shape)
    )


def _span(local: LocalCall) -> Span | None:
    source = local.inputs[0]
    return span_of(source, local.call.arg("dim") % max(source.ndim, 1))


def _local_gather(local: LocalCall) -> Callable[..., Any] | None:
    span = _span(local)
    if span is None:
        return None

    def run(tensor: Tensor, _: int, index: Tensor, **__: Any) -> Tensor:
        located, inside = span.find(index)
        found = never_empty(tensor, [span]).gather(span.dim, located)
        return found.masked_fill(~inside, 0)

    return run


def _local_scatter(local: LocalCall) -> Callable[..., Any] | None:
    span, op, writes = _span(local), local.call.op, is_in_place(local.op)
    if span is None:
        return None

    def run(tensor: Tensor, _: int, index: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        located, inside = span.find(index)
        # What belongs to others goes to one more place at the end, which is dropped.
        located = torch.where(inside | (located == span.nowhere), located, span.count)
        more = tensor.new_zeros([1 if d == span.dim else n for d, n in enumerate(tensor.shape)])
        extended = op(torch.cat([tensor, more], span.dim), span.dim, located, *rest, **kwargs)
        made = extended.narrow(span.dim, 0, span.count)
        return tensor.copy_(made) if writes else made.contiguous()

    return run


@rule(aten.index_select.default)
def index_select_rule(call: OpCall) -> Rule:
    """Elements by indices into one dim."""
    source, index = call.specs
    if not source.ndim:
        return needs_whole(call)
    dim, dims, found = call.arg("dim") % source.ndim, all_dims(source.ndim), Dim(source.ndim)
    output = with_dim(dims, dim, found if index.ndim else None)
    inputs = (dims, (found,) * index.ndim)
    return picking(call, inputs, output, (dim,), _local_index_select)


@rule(
    *operators(aten, "index_add index_copy index_reduce"),
    *operators(aten, "index_fill.int_Scalar index_fill.int_Tensor"),
)
def index_write_rule(call: OpCall) -> Rule:
    """One dim written at indices into it."""
    source, index, values = call.specs[0], call.specs[1], call.specs[2:]
    if not source.ndim or any(spec.ndim not in (0, source.ndim) for spec in values):
        return needs_whole(call)
    dim, dims, name = call.arg("dim") % source.ndim, all_dims(source.ndim), base_name(call.op)
    found = Dim(source.ndim) if name == "index_add" and index.ndim else None
    part = with_dim(dims, dim, found)
    ops = {"index_add": LINEAR_OPS, "index_copy": REDUCE_OPS}.get(name, ())
    return Factors(
        call,
        inputs=(dims, (found,) * index.ndim, *(part if v.ndim else () for v in values)),
        outputs=(dims,),
        reduce={found.factor: "sum"} if found else {},
        addends=frozenset({0}),
        linear=(frozenset({0, 2}),) if ops else (),
        linear_ops=ops,
        local=_local_index_write,
        positions=frozenset({dim}),
    )


def _local_index_select(local: LocalCall) -> Callable[..., Any] | None:
    span = _span(local)
    if span is None:
        return None
    dim, after = span.dim, local.inputs[0].ndim - span.dim - 1

    def run(tensor: Tensor, _: int, index: Tensor) -> Tensor:
        located, inside = span.find(index.reshape(-1))
        found = never_empty(tensor, [span]).index_select(dim, located)
        return found.masked_fill(~inside[(..., *(None,) * after)], 0)

    return run


def _local_index_write(local: LocalCall) -> Callable[..., Any] | None:
    span, op = _span(local), local.op
    if span is None:
        return None
    dim = span.dim

    def run(tensor: Tensor, _: int, index: Tensor, value: Any, *rest: Any, **kwargs: Any) -> Tensor:
        places, located = span.keep(index.reshape(-1))
        if isinstance(value, Tensor) and value.ndim:
            value = value.index_select(dim, places)
        return op(tensor, dim, located, value, *rest, **kwargs)

    return run
