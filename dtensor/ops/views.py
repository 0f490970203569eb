"""Views: dims that are moved, joined, split, added or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.box import row_major_strides
from ..geometry.placement import REDUCE_OPS
from ..tensor.schemas import base_name
from .engine.factors import LINEAR_OPS, Dim, Dims, Factors
from .engine.local import reshaped, with_local_shape
from .engine.table import LocalCall, LocalMaker, OpCall, Rule, rule
from .reshaping import reshape_dims

aten = torch.ops.aten


@rule(aten.t.default, aten.transpose.int, aten.permute.default)
def permuted(call: OpCall) -> Rule:
    """Dims in another order."""
    ndim = call.specs[0].ndim
    order = list(range(ndim))
    if call.op is aten.permute.default:
        order = [dim % ndim for dim in call.args[1]]
    elif ndim:
        a, b = (0, ndim - 1) if call.op is aten.t.default else call.args[1:3]
        order[a % ndim], order[b % ndim] = order[b % ndim], order[a % ndim]
    return unary(call, all_dims(ndim), tuple(Dim(i) for i in order))


@rule(aten.unsqueeze.default)
def unsqueezed(call: OpCall) -> Rule:
    """A new dim of size 1."""
    ndim = call.specs[0].ndim
    out: list[Dim | None] = list(all_dims(ndim))
    out.insert(call.args[1] % (ndim + 1), None)
    return unary(call, all_dims(ndim), tuple(out))


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def reshape(call: OpCall) -> Rule:
    """Dims joined and split; a group of them may be cut along its first dim."""
    first, source = call.outputs[0], call.specs[0]
    cut = frozenset(dim for dim, splits in enumerate(source.layout.splits) if splits)
    inputs, outputs = reshape_dims(source.shape, first.shape if first else (), cut)
    return unary(call, inputs, outputs, reshaped)


@rule(aten.expand.default)
def expanded(call: OpCall) -> Rule:
    """Dims of size 1 repeated, and new ones in front."""
    source, first = call.specs[0], call.outputs[0]
    shape = first.shape if first else ()
    lead = len(shape) - source.ndim
    dims: Dims = tuple(
        Dim(i) if size == shape[lead + i] else None for i, size in enumerate(source.shape)
    )
    return unary(call, dims, (None,) * lead + dims, with_local_shape(1, "size"))


@rule(aten.view.dtype)
def reinterpreted(call: OpCall) -> Rule:
    """The same bytes as another dtype: the last dim grows or shrinks."""
    source, first = call.specs[0], call.outputs[0]
    dims = all_dims(source.ndim)
    if first is None or source.ndim == 0 or first.dtype.itemsize == source.dtype.itemsize:
        return unary(call, dims, dims, _empty_or_view, ())
    larger, smaller = source.dtype.itemsize, first.dtype.itemsize
    unit, other = max(larger // smaller, 1), max(smaller // larger, 1)
    last = source.ndim - 1
    ins, outs = (*dims[:-1], Dim(last, unit)), (*dims[:-1], Dim(last, other))
    return unary(call, ins, outs, _empty_or_view, ())


def _empty_or_view(local: LocalCall) -> Callable[..., Any] | None:
    """Return what views other strides than the whole tensor has, or nothing, which may have any."""
    shape, first = local.output_shape, local.outputs[0]
    dtype, source = first.dtype if first else None, local.inputs[0].dtype
    if 0 in shape:
        return lambda tensor, *_: tensor.new_empty(shape, dtype=dtype)  # pyright: ignore[reportUnknownLambdaType]
    if dtype is None or dtype.itemsize == source.itemsize:
        return None
    count, op = max(dtype.itemsize // source.itemsize, 1), local.op
    return lambda tensor, *rest: op(_side_by_side(tensor, count), *rest)  # pyright: ignore[reportUnknownLambdaType]


@rule(aten.view_as_real.default, aten.view_as_complex.default)
def complex_parts(call: OpCall) -> Rule:
    """A last dim for the real and the imaginary parts."""
    ndim = call.specs[0].ndim
    if base_name(call.op) == "view_as_real":
        return unary(call, all_dims(ndim), (*all_dims(ndim), None), _resolved, LINEAR_OPS)
    rest = all_dims(ndim - 1)
    return unary(call, (*rest, None), rest, _empty_or_view, LINEAR_OPS)


def _resolved(local: LocalCall) -> Callable[..., Any]:
    """Return what takes a local tensor that is conjugate in name only, as the whole one is not."""
    op = local.op
    return lambda tensor: op(tensor.resolve_conj())  # pyright: ignore[reportUnknownLambdaType]


def _side_by_side(tensor: Tensor, count: int) -> Tensor:
    """Return a tensor whose last dim lies in groups of ``count`` numbers, a copy if it does not.

    A local tensor may have any strides, on one rank alone, of which the global ones do not know.
    """
    steps = (tensor.storage_offset(), *tensor.stride()[:-1])
    if tensor.stride(-1) == 1 and not any(step % count for step in steps):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@rule(aten.diagonal.default)
def diagonal(call: OpCall) -> Rule:
    """The diagonal of two dims, which must be whole, as a new last dim."""
    ndim = call.specs[0].ndim
    ins, rest = without(ndim, call.arg(2, "dim1", 0), call.arg(3, "dim2", 1))
    return unary(call, ins, (*rest, None))


@rule(aten.diagonal_backward.default)
def diagonal_backward(call: OpCall) -> Rule:
    """Its gradient: zero beside the diagonal."""
    outs, rest = without(len(call.args[1]), *call.args[3:5])
    return unary(call, (*rest, None), outs, with_local_shape(1, "input_sizes"))


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: OpCall) -> Rule:
    """A tensor with another diagonal."""
    ndim = call.specs[0].ndim
    dims, rest = without(ndim, call.arg(3, "dim1", 0), call.arg(4, "dim2", 1))
    return Rule(
        rows=Factors(
            call=call,
            inputs=(dims, (*rest, None)),
            outputs=(dims,),
            linear=(frozenset({0, 1}),),
            linear_ops=REDUCE_OPS,
        )
    )


@rule(aten.diag_embed.default)
def diag_embed(call: OpCall) -> Rule:
    """The last dim as the diagonal of two new dims."""
    ndim = call.specs[0].ndim + 1
    outs, rest = without(ndim, call.arg(2, "dim1", -2), call.arg(3, "dim2", -1))
    return unary(call, (*rest, None), outs)


@rule(aten.unfold.default)
def unfolded(call: OpCall) -> Rule:
    """Windows of a dim, which must be whole, along a new last dim."""
    ins, _ = without(call.specs[0].ndim, call.args[1])
    return unary(call, ins, (*ins, None))


@rule(aten.unfold_backward.default)
def unfold_backward(call: OpCall) -> Rule:
    """Its gradient: the windows added up."""
    outs, _ = without(len(call.args[1]), call.args[2])
    local = with_local_shape(1, "input_sizes")
    return unary(call, (*outs, None), outs, local, linear_ops=LINEAR_OPS)


@rule(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
def strided(call: OpCall) -> Rule:
    """Elements by their place in memory: that of the whole tensor, with its own strides."""
    if call.specs[0].stride != row_major_strides(call.specs[0].shape):
        _require_own_memory(call)
    return whole(call, _with_global_strides)


def _require_own_memory(call: OpCall) -> None:
    """Raise PlacementError where places lie between the elements, as beside those of a slice."""
    source, first = call.specs[0], 2 if base_name(call.op) == "as_strided_scatter" else 1
    sizes, strides = call.args[first], call.args[first + 1]
    offset = call.arg(first + 2, "storage_offset") or 0
    is_own = torch.zeros(max(_extent(source.shape, source.stride), 0), dtype=torch.bool)
    is_own.as_strided(source.shape, source.stride).fill_(True)
    if not is_own.as_strided(sizes, strides, offset).all():
        raise PlacementError(
            f"{call.op} reads {source} with the strides {source.stride} by places in memory that "
            "are not all its own; take it of the tensor that this is a part of"
        )


def _with_global_strides(local: LocalCall) -> Callable[..., Any]:
    op, stride = local.op, local.call.specs[0].stride
    is_scatter = base_name(op) == "as_strided_scatter"

    def run(tensor: Tensor, *args: Any, storage_offset: int | None = None, **kwargs: Any) -> Tensor:
        if tensor.stride() != stride and tensor.numel():
            tensor = _with_strides(tensor, stride)
        count = 3 if is_scatter else 2
        given = args[count] if len(args) > count else storage_offset
        offset = tensor.storage_offset() + (given or 0)  # a DTensor itself starts at 0
        return op(tensor, *args[:count], offset, **kwargs)

    return run


def _with_strides(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a copy with other strides, by which elements that are equal may share memory."""
    places = torch.arange(_extent(tensor.shape, stride), device=tensor.device)
    memory = tensor.new_empty(places.shape)
    memory[places.as_strided(tensor.shape, stride)] = tensor
    return memory.as_strided(tensor.shape, stride)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum(step * (size - 1) for step, size in zip(stride, shape, strict=True))


def all_dims(ndim: int) -> Dims:
    """Return a factor for every dim."""
    return tuple(Dim(i) for i in range(ndim))


def without(ndim: int, *whole: int) -> tuple[Dims, Dims]:
    """Return a factor for every dim but some, once in place of all dims and once alone."""
    excluded = {dim % max(ndim, 1) for dim in whole}
    dims: Dims = tuple(None if i in excluded else Dim(i) for i in range(ndim))
    return dims, tuple(dim for dim in dims if dim is not None)


def whole(call: OpCall, local: LocalMaker | None = None) -> Rule:
    """Return the rule of an operator that needs all of every tensor."""
    inputs = tuple((None,) * spec.ndim for spec in call.specs)
    outputs = tuple((None,) * len(meta.shape) if meta else () for meta in call.outputs)
    return Rule(rows=Factors(call=call, inputs=inputs, outputs=outputs), local=local)


def unary(
    call: OpCall,
    inputs: Dims,
    outputs: Dims,
    local: LocalMaker | None = None,
    linear_ops: tuple[str, ...] = REDUCE_OPS,
) -> Rule:
    """Return the rule of an operator on one tensor that does not compute with its values."""
    return Rule(
        rows=Factors(
            call=call,
            inputs=(inputs,),
            outputs=(outputs,) * len(call.outputs),
            linear=(frozenset({0}),),
            linear_ops=linear_ops,
        ),
        local=local,
    )
