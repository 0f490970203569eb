"""Views: dims that are moved, joined, split, added or dropped, and copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.arguments import map_tensors
from ..tensor.schemas import Op, base_name
from .engine.dims import all_dims, broadcast_dims, without
from .engine.factors import LINEAR_OPS, Dim, Dims
from .engine.forms import operators
from .engine.local_kernels import reshaped, with_local_shape
from .engine.rules import moving
from .engine.table import DECOMPOSITIONS, Decomposition, LocalCall, OpCall, Rule, in_any_order, rule

aten = torch.ops.aten


@rule(aten.t.default, aten.transpose.int, aten.permute.default)
def permute_rule(call: OpCall) -> Rule:
    """Dims in another order."""
    ndim = call.specs[0].ndim
    order = list(range(ndim))
    if call.op is aten.permute.default:
        order = [dim % ndim for dim in call.arg("dims")]
    elif ndim:
        a, b = (0, ndim - 1) if call.op is aten.t.default else call.args[1:3]
        order[a % ndim], order[b % ndim] = order[b % ndim], order[a % ndim]
    return moving(call, (all_dims(ndim),), (tuple(Dim(i) for i in order),))


@rule(aten.unsqueeze.default)
def unsqueeze_rule(call: OpCall) -> Rule:
    """A new dim of size 1."""
    ndim = call.specs[0].ndim
    out: list[Dim | None] = list(all_dims(ndim))
    out.insert(call.arg("dim") % (ndim + 1), None)
    return moving(call, (all_dims(ndim),), (tuple(out),))


@rule(*operators(aten, "view _unsafe_view reshape _reshape_alias squeeze squeeze.dim squeeze.dims"))
def reshape_rule(call: OpCall) -> Rule:
    """Dims joined and split; a group of them may be cut along its first dim."""
    source = call.specs[0]
    cut = frozenset(dim for dim, splits in enumerate(source.layout.splits) if splits)
    inputs, outputs = _reshape_dims(source.shape, call.output_shape, cut)
    return moving(call, (inputs,), (outputs,), reshaped)


def _reshape_dims(
    source: Sequence[int], target: Sequence[int], cut: frozenset[int] = frozenset()
) -> tuple[Dims, Dims]:
    """Return the factors of a reshape: one per smallest group of dims of equal product.

    The first dim of a group larger than 1 carries the factor, in units of what follows it. Dims of
    size 1 stand for each other. Where the target has fewer of them, one that is ``cut`` carries
    the factor of a group instead, in units of all of it: one rank has everything.

    >>> _reshape_dims((4, 3, 5), (12, 5))[0]
    (Dim(factor=0, unit=3, window=None), None, Dim(factor=1, unit=1, window=None))
    >>> _reshape_dims((1, 6), (6,), frozenset({0}))[0]
    (Dim(factor=0, unit=6, window=None), None)
    """
    inputs: list[Dim | None] = [None] * len(source)
    outputs: list[Dim | None] = [None] * len(target)
    if 0 in source:
        return tuple(inputs), tuple(outputs)
    ones = _matched_ones(source, target, cut)
    spare = [dim for dim in sorted(cut) if source[dim] == 1 and dim not in ones]
    factor = 0
    for lead, led, product in _groups(source, target):
        if spare and lead not in cut:
            inputs[spare.pop(0)] = Dim(factor, product)
        else:
            inputs[lead] = Dim(factor, product // source[lead])
        outputs[led] = Dim(factor, product // target[led])
        factor += 1
    for number, (one, other) in enumerate(ones.items(), factor):
        inputs[one] = outputs[other] = Dim(number)
    return tuple(inputs), tuple(outputs)


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first dim of every group in both shapes, and its product.

    Dims of size 1 are in none.
    """
    left = [dim for dim, size in enumerate(source) if size > 1]
    right = [dim for dim, size in enumerate(target) if size > 1]
    i = j = 0
    while i < len(left) and j < len(right):
        lead, led = left[i], right[j]
        product, other = source[lead], target[led]
        i, j = i + 1, j + 1
        while product != other:
            if product < other:
                product, i = product * source[left[i]], i + 1
            else:
                other, j = other * target[right[j]], j + 1
        yield lead, led, product


def _matched_ones(
    source: Sequence[int], target: Sequence[int], cut: frozenset[int]
) -> dict[int, int]:
    """Return the dims of size 1 that stay, with their places in the target; cut ones go first."""
    free = [dim for dim, size in enumerate(target) if size == 1]
    ones = sorted((d for d, size in enumerate(source) if size == 1), key=lambda d: d not in cut)
    found: dict[int, int] = {}
    for dim in ones[: len(free)]:
        found[dim] = free.pop(free.index(dim) if dim in free else 0)
    return found


@rule(aten.expand.default)
def expand_rule(call: OpCall) -> Rule:
    """Dims of size 1 repeated, and new ones in front."""
    dims = broadcast_dims(call.specs[0], call.output_shape)
    lead = (None,) * (len(call.output_shape) - len(dims))
    return moving(call, (dims,), ((*lead, *dims),), with_local_shape("size"))


@rule(aten.view.dtype)
def view_dtype_rule(call: OpCall) -> Rule:
    """The same bytes as another dtype: the last dim grows or shrinks."""
    source, first = call.specs[0], call.outputs[0]
    dims = all_dims(source.ndim)
    if first is None or source.ndim == 0 or first.dtype.itemsize == source.dtype.itemsize:
        return moving(call, (dims,), (dims,), _empty_or_view, ())
    larger, smaller = source.dtype.itemsize, first.dtype.itemsize
    unit, other = max(larger // smaller, 1), max(smaller // larger, 1)
    last = source.ndim - 1
    ins, outs = (*dims[:-1], Dim(last, unit)), (*dims[:-1], Dim(last, other))
    return moving(call, (ins,), (outs,), _empty_or_view, ())


@in_any_order
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
def complex_parts_rule(call: OpCall) -> Rule:
    """A last dim for the real and the imaginary parts."""
    ndim = call.specs[0].ndim
    if base_name(call.op) == "view_as_real":
        return moving(call, (all_dims(ndim),), ((*all_dims(ndim), None),), _resolved, LINEAR_OPS)
    rest = all_dims(ndim - 1)
    return moving(call, ((*rest, None),), (rest,), _empty_or_view, LINEAR_OPS)


@in_any_order
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


@rule(aten.unfold.default)
def unfold_rule(call: OpCall) -> Rule:
    """Windows of a dim, which must be whole, along a new last dim."""
    ins, _ = without(call.specs[0].ndim, call.arg("dimension"))
    return moving(call, (ins,), ((*ins, None),))


@rule(aten.unfold_backward.default)
def unfold_backward_rule(call: OpCall) -> Rule:
    """Its gradient: the windows added up."""
    outs, _ = without(len(call.arg("input_sizes")), call.arg("dim"))
    local = with_local_shape("input_sizes")
    return moving(call, ((*outs, None),), (outs,), local, linear_ops=LINEAR_OPS)


_VIEWS = (
    "_reshape_alias.default diagonal.default expand.default permute.default select.int slice.Tensor"
    " split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default"
    " transpose.int unbind.int unfold.default unsqueeze.default view.dtype"
    " view_as_complex.default view_as_real.default narrow.default"
)


def _copy_of(view: Op) -> Decomposition:
    def run(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(copied, view(*args, **kwargs))

    def copied(part: Tensor) -> Tensor:
        return part.clone(memory_format=torch.contiguous_format)

    return run


def _register() -> None:
    for text in _VIEWS.split():
        name, overload = text.split(".")
        view = getattr(getattr(aten, name), overload)
        DECOMPOSITIONS[getattr(getattr(aten, f"{name}_copy"), overload)] = _copy_of(view)
    for op in (aten._reshape_copy.default, aten.view_copy.default):  # of any strides
        DECOMPOSITIONS[op] = _copy_of(aten.reshape.default)


_register()
