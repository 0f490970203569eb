"""Ranges of a dim: what a rank has of a slice is the slice of what it has of the tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..mesh.spec import DTensorSpec
from .engine.dims import all_dims, with_dim, without
from .engine.factors import Dim, Dims, Factors
from .engine.forms import operators
from .engine.local_kernels import with_local_shape
from .engine.rules import moving, picking
from .engine.table import LocalCall, OpCall, Rule, in_any_order, rule
from .engine.windows import num_below
from .packed import split_parts

aten = torch.ops.aten


@rule(aten.slice.Tensor)
def slice_rule(call: OpCall) -> Rule:
    """A range of a dim."""
    dim, window, dims, part = _sliced(call, call.specs[0].shape)
    packed = split_parts(call, dim, [window])
    if packed is not None:
        return packed
    return moving(call, (dims,), (part,), _local_parts(dim, [window]))


@rule(*operators(aten, "split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes"))
def split_rule(call: OpCall) -> Rule:
    """A dim in consecutive parts."""
    source = call.specs[0]
    dim = call.arg("dim") % source.ndim
    dims, windows, start = all_dims(source.ndim), list[range](), 0
    for meta in call.outputs:
        windows.append(range(start, start + (meta.shape[dim] if meta else 0)))
        start = windows[-1].stop
    packed = split_parts(call, dim, windows)
    if packed is not None:
        return packed
    outputs = tuple(_windowed(dims, dim, window, source.shape[dim]) for window in windows)
    return moving(call, (dims,), outputs, _local_parts(dim, windows))


@rule(aten.unbind.int)
def unbind_rule(call: OpCall) -> Rule:
    """A dim, which must be whole, as so many tensors."""
    dims, rest = without(call.specs[0].ndim, call.arg("dim"))
    return moving(call, (dims,), (rest,) * len(call.outputs))


@rule(aten.select.int)
def select_rule(call: OpCall) -> Rule:
    """One index of a dim: a rank that does not have it has a zero term."""
    ndim = call.specs[0].ndim
    dim, dims = call.arg("dim") % ndim, all_dims(ndim)
    return picking(call, (dims,), dims[:dim] + dims[dim + 1 :], (dim,), _local_select)


@rule(aten.slice_backward.default)
def slice_backward_rule(call: OpCall) -> Rule:
    """The gradient of a slice: zero elsewhere."""
    dim, window, dims, part = _sliced(call, call.arg("input_sizes"))
    return moving(call, (part,), (dims,), _local_backward(dim, window))


@rule(aten.select_backward.default)
def select_backward_rule(call: OpCall) -> Rule:
    """The gradient of one index: zero elsewhere."""
    dims, rest = without(len(call.arg("input_sizes")), call.arg("dim"))
    return moving(call, (rest,), (dims,), with_local_shape("input_sizes"))


@rule(aten.slice_scatter.default)
def slice_scatter_rule(call: OpCall) -> Rule:
    """A tensor with another range of a dim."""
    dim, window, dims, part = _sliced(call, call.specs[0].shape)
    if (
        len(call.specs[0].layout.splits[dim]) > 1
    ):  # its pieces have no placement: each takes its own
        part = with_dim(dims, dim, None)
    return moving(call, (dims, part), (dims,), _local_scatter(dim, window))


@rule(aten.select_scatter.default)
def select_scatter_rule(call: OpCall) -> Rule:
    """A tensor with another value at one index of a dim; the rank that has the index writes it."""
    source = call.specs[0]
    dim, dims = call.arg("dim") % source.ndim, all_dims(source.ndim)
    index = call.arg("index") % source.shape[dim]
    local = _local_scatter(dim, range(index, index + 1), is_select=True)
    return moving(call, (dims, dims[:dim] + dims[dim + 1 :]), (dims,), local)


@rule(aten.slice_inverse.default)
def slice_inverse_rule(call: OpCall) -> Rule:
    """The tensor that a slice was taken from, by its memory."""
    _, _, dims, part = _sliced(call, call.specs[1].shape)
    return Factors(call, (part, dims), (dims,), local=_local_inverse)


def _sliced(call: OpCall, shape: Sequence[int]) -> tuple[int, range, Dims, Dims]:
    """Return the dim of a slice of ``shape``, its elements, and the dims of tensor and slice."""
    dim, dims = call.arg("dim") % len(shape), all_dims(len(shape))
    named = slice(call.arg("start"), call.arg("end"), call.arg("step"))
    window = range(*named.indices(shape[dim])) or range(0)
    return dim, window, dims, _windowed(dims, dim, window, shape[dim])


def _windowed(dims: Dims, dim: int, window: range, size: int) -> Dims:
    """Return dims of which one has the steps of a window, unless these are all of them."""
    return dims if len(window) == size else with_dim(dims, dim, Dim(dim, window=window))


def _own(part: DTensorSpec, tensor: DTensorSpec, dim: int, window: range) -> slice:
    """Return where this rank's part of a window lies in its part of the tensor."""
    if part.box is None or tensor.box is None or not part.box.sizes[dim]:
        return slice(0, 0)
    start = window[part.box.offsets[dim]] - tensor.box.offsets[dim]
    return _steps(start, part.box.sizes[dim], window.step)


def _steps(start: int, count: int, step: int) -> slice:
    """Return the slice of some elements, which are one at least."""
    return slice(start, start + (count - 1) * step + 1, step)


def _taken(tensor: Tensor, dim: int, own: slice) -> Tensor:
    return aten.slice.Tensor(tensor, dim, own.start, own.stop, own.step or 1)


def _local_parts(dim: int, windows: Sequence[range]) -> Any:
    @in_any_order
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        if not local.inputs[0].layout.splits[dim]:
            return None
        outputs = [spec for spec in local.outputs if spec is not None]
        owns = [
            _own(part, local.inputs[0], dim, window)
            for part, window in zip(outputs, windows, strict=True)
        ]
        if local.op is aten.slice.Tensor:
            return lambda tensor, *_, **__: _taken(tensor, dim, owns[0])  # pyright: ignore[reportUnknownLambdaType]
        return lambda tensor, *_, **__: [_taken(tensor, dim, own) for own in owns]  # pyright: ignore[reportUnknownLambdaType]

    return maker


def _local_select(local: LocalCall) -> Callable[..., Any] | None:
    source, (_, dim, index) = local.inputs[0], local.call.args
    dim %= source.ndim
    if not source.layout.splits[dim] or source.box is None:
        return None
    own = index % source.shape[dim] - source.box.offsets[dim]
    shape = local.output_shape
    if 0 <= own < source.box.sizes[dim]:
        return lambda tensor, *_: tensor.select(dim, own)  # pyright: ignore[reportUnknownLambdaType]
    return lambda tensor, *_: tensor.new_zeros(shape)  # pyright: ignore[reportUnknownLambdaType]


def _local_backward(dim: int, window: range) -> Any:
    @in_any_order
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        grad, output = local.inputs[0], local.outputs[0]
        if output is None or not output.layout.splits[dim]:
            return with_local_shape("input_sizes")(local)
        own, shape = _own(grad, output, dim, window), local.output_shape

        def run(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
            made = tensor.new_zeros(shape)
            _taken(made, dim, own).copy_(tensor)
            return made

        return run

    return maker


def _local_scatter(dim: int, window: range, *, is_select: bool = False) -> Any:
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        tensor, part = local.inputs
        if not tensor.layout.splits[dim] or tensor.box is None:
            return None
        start, end = tensor.box.offsets[dim], tensor.box.ends[dim]
        skipped = num_below(start, window)
        count = num_below(end, window) - skipped if end > start else 0
        own = _steps(window[skipped] - start, count, window.step) if count else slice(0, 0)
        is_cut = not is_select and bool(part.layout.splits[dim])

        def run(whole: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
            made = whole.clone()
            if count:
                values = source.unsqueeze(dim) if is_select else source
                own_values = values if is_cut else values.narrow(dim, skipped, count)
                _taken(made, dim, own).copy_(own_values)
            return made

        return run

    return maker


def _local_inverse(local: LocalCall) -> Callable[..., Any]:
    part, source = local.call.specs
    if (part.layout, source.layout) != tuple(spec.layout for spec in local.inputs):
        raise PlacementError(
            f"{local.op}({part}, {source}): the slice does not lie as the tensor does, so it "
            "shares no memory with it; slice the tensor again"
        )

    def run(tensor: Tensor, whole: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor.as_strided(whole.shape, whole.stride(), whole.storage_offset())

    return run
