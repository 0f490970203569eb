"""Embeddings: rows of a weight; a rank that does not have a row has a zero term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import REDUCE_OPS
from .engine.dims import all_dims
from .engine.factors import FIRST, Dim, Dims, Factors
from .engine.local_indices import never_empty, span_of
from .engine.rules import bytes_to_reduce
from .engine.table import LocalCall, OpCall, Rule, meta, rule

aten = torch.ops.aten

MAX_MODE = 2
"""Of ``embedding_bag``, which then returns the index of each largest element."""


@rule(aten.embedding.default)
def embedding_rule(call: OpCall) -> Rule:
    """Rows by index. A weight that is sharded by rows (vocabulary parallel) stays where it is."""
    weight, index = call.specs
    row, column = Dim(index.ndim), Dim(index.ndim + 1)
    indices = all_dims(index.ndim)
    later = bytes_to_reduce(weight, call.outputs[0])
    shares_axis = [
        0.0 if place.is_replicate() else cost
        for place, cost in zip(index.placements, later, strict=True)
    ]
    return Factors(
        call,
        inputs=((row, column), indices),
        outputs=((*indices, column),),
        reduce={row.factor: "sum"},
        reduce_bytes={row.factor: shares_axis},
        linear=FIRST,
        linear_ops=REDUCE_OPS,
        local=_local_rows,
        positions=frozenset({row.factor}),
    )


@rule(aten.embedding_dense_backward.default)
def embedding_backward_rule(call: OpCall) -> Rule:
    """The gradient of the weight: a sum over all indices."""
    count = call.specs[1].ndim
    indices, column = all_dims(count), Dim(count)
    scales = call.arg("scale_grad_by_freq")
    if scales:  # the gradient is divided by how often an index occurs, over all of them
        indices = (None,) * count
    return Factors(
        call,
        inputs=((*indices, column), indices),
        outputs=((None, column),),
        reduce={} if scales else dict.fromkeys(range(count), "sum"),
        linear=FIRST,
    )


@rule(aten.embedding_renorm.default)
def embedding_renorm_rule(call: OpCall) -> Rule:
    """Rows scaled down to a norm, each by the ranks that have it."""
    indices: Dims = (None,) * call.specs[1].ndim
    dims: Dims = (Dim(0), None)
    return Factors(call, (dims, indices), (dims,), local=_local_renorm)


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag_rule(call: OpCall) -> Rule:
    """Sums, means or maxima of rows; the columns pass through."""
    wide = (0, 3) if call.arg("mode") == MAX_MODE else (0,)
    return Factors(
        call,
        inputs=_with_columns([spec.shape for spec in call.specs], 0),
        outputs=_with_columns([meta.shape if meta else () for meta in call.outputs], *wide),
        untouched=(frozenset(), *[frozenset({0})] * 3),
        local=_local_bags,
    )


def _with_columns(shapes: Sequence[Sequence[int]], *wide: int) -> tuple[Dims, ...]:
    """Return the dims of tensors of which some have columns, which are factor 0, as second dim."""
    return tuple(
        (None, Dim(0)) if index in wide else (None,) * len(shape)
        for index, shape in enumerate(shapes)
    )


@rule(aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
def embedding_bag_backward_rule(call: OpCall) -> Rule | None:
    """The gradient of the weight of bags."""
    if call.arg("sparse"):  # a sparse gradient
        return None
    is_dense = call.op is aten._embedding_bag_dense_backward.default
    wide = (0, 4 if is_dense else 5) if call.arg("mode") == MAX_MODE else (0,)
    inputs = _with_columns([spec.shape for spec in call.specs], *wide)
    return Factors(call, inputs, ((None, Dim(0)),))


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward_rule(call: OpCall) -> Rule:
    """The gradient of the weights of single samples: a sum over the columns."""
    return Factors(
        call,
        inputs=_with_columns([spec.shape for spec in call.specs], 0, 1),
        outputs=((None,),),
        reduce={0: "sum"},
        linear=(frozenset({0}), frozenset({1})),
    )


def _local_rows(local: LocalCall) -> Callable[..., Any] | None:
    span = span_of(local.inputs[0], 0)
    if span is None:
        return None

    def run(weight: Tensor, index: Tensor, *_: Any, **__: Any) -> Tensor:
        located, inside = span.find(index)
        found = aten.embedding.default(never_empty(weight, [span]), located)
        return found.masked_fill(~inside[..., None], 0)

    return run


def _local_bags(local: LocalCall) -> Callable[..., Any] | None:
    span, op = span_of(local.inputs[0], 1), local.op
    lacks_columns = span is not None and not span.count
    _, bag_of, sizes, largest = local.outputs
    if bag_of is None or sizes is None or largest is None:
        return None
    num_bags, is_max = sizes.shape[0], largest.ndim == 2

    def run(weight: Tensor, index: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> Any:
        if lacks_columns and span is not None:
            # Torch refuses rows without columns, which would stop this rank alone.
            weight = never_empty(weight, [span])
        bags, bag_of, sizes, largest = op(weight, index, offsets, *args, **kwargs)
        # Kernels leave out what they need not, as the strides of the weight on this rank allow.
        if bag_of.shape != index.shape:
            places = torch.arange(len(index), device=index.device)
            bag_of = torch.bucketize(places, offsets, right=True).sub_(1).to(bag_of.dtype)
        if not is_max:
            largest = torch.zeros_like(sizes)
        if lacks_columns:
            bags, largest = bags[:, :0], largest[:, :0] if is_max else largest
        return bags, bag_of, sizes[:num_bags], largest[:num_bags]

    return run


@meta(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag_meta(
    weight: Tensor,
    index: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bags, the bag of each index, sizes of bags and indices of maxima, one for each bag."""
    made = aten._embedding_bag.default(
        weight,
        index,
        offsets,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )
    bags, kind = made[0], torch.promote_types(index.dtype, offsets.dtype)
    sizes = offsets.new_empty(len(bags), dtype=kind)
    largest = sizes.new_empty(bags.shape) if mode == MAX_MODE else sizes
    return bags, index.new_empty(index.shape, dtype=kind), sizes, largest


def _local_renorm(local: LocalCall) -> Callable[..., Any] | None:
    span, op = span_of(local.inputs[0], 0), local.op
    if span is None:
        return None

    def run(weight: Tensor, index: Tensor, *rest: Any) -> Tensor:
        _, located = span.keep(index.reshape(-1))
        return op(weight, located, *rest)

    return run
