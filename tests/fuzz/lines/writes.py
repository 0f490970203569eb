"""Lines that write in place: by operators, by indices, by ``.data``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..drawing import Draw, Refused, dtype_name, has_dims, is_any
from .pointwise import IN_PLACE, IN_PLACE_UNARY
from .producers import producer
from .views import index_text, indexed


def writable(d: Draw, *tests: Callable[[Tensor], bool], distributed: bool = True) -> str:
    """Return a tensor that lines may write."""

    def may_be_written(value: Tensor) -> bool:
        return value.untyped_storage().data_ptr() not in d.sealed

    return d.pick(may_be_written, is_any, *tests, distributed=distributed)


def written(d: Draw, name: str, text: str) -> str:
    """Return a line that writes to a tensor, without its gradient where it is a leaf."""
    value = d.values[name]
    if value.is_leaf and value.requires_grad:
        return f"with torch.no_grad(): {text}"
    return text


def apart(d: Draw, name: str, other: str) -> str:
    """Return what a line may read while it writes to a tensor: another tensor, or a copy of that.

    One device leaves undefined what it reads of the memory that it is writing, but for the very
    elements; a rank may read a copy that it got from others. Nor is anything told of autograd that
    follows integers, which torch has or refuses by kinds of tensors.
    """
    if not has_gradient_dtype(d.values[name]) and d.values[other].requires_grad:
        other = f"{other}.detach()"
    elif _are_mixed(d.values[name], d.values[other]):
        other = f"{other}.clone()"
    return other


def has_gradient_dtype(value: Tensor) -> bool:
    """Whether a tensor is of a dtype that gradients have."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def _are_mixed(value: Tensor, other: Tensor) -> bool:
    if value.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if value.dtype != other.dtype:
        return True
    lies, others = [(t.shape, t.stride(), t.storage_offset()) for t in (value, other)]
    return lies != others and not _places(value).isdisjoint(_places(other))


def _places(value: Tensor) -> set[int]:
    """Return which elements of its memory a tensor has."""
    count = value.untyped_storage().nbytes() // value.element_size()
    all_places = torch.arange(count)
    seen = all_places.as_strided(value.shape, value.stride(), value.storage_offset())
    return set(seen.flatten().tolist())


@producer("writes", 4)
def write_pointwise(d: Draw) -> str:
    x = writable(d)
    if d.chance(0.3):
        return written(d, x, f"{x}.{d.one(IN_PLACE_UNARY)}()")
    y = d.number() if d.chance(0.5) else apart(d, x, d.beside(x))
    return written(d, x, f"{x}.{d.one(IN_PLACE)}({y})")


@producer("writes", 2)
def write_more(d: Draw) -> str:
    x = writable(d)
    y = apart(d, x, d.beside(x))
    text = d.one(
        [
            "{x}.addcmul_({y}, {y}, value={s})",
            "{x}.addcdiv_({y}, {y}, value={s})",
            "{x}.lerp_({y}, {s})",
            "{x}.fill_({s})",
            "{x}.clamp_({s}, {s})",
            "{x}.masked_fill_({x} > 0, {s})",
            "{x}.add_({y}, alpha={s})",
            "{x}.sub_({y}, alpha={s})",
            "{x}.copy_({y})",
            "{x} += {y}",
            "{x} *= {s}",
            "{x} //= {s}",
            "{x}.where({x} > 0, {y})",
        ]
    )
    s = d.number() if "{s}" in text else ""
    if "[" in x and "=" in text and "._" not in text and text.split()[1:2] in (["+="], ["*="]):
        raise Refused
    return written(d, x, text.format(x=x, y=y, s=s))


@producer("writes", 3)
def write_index(d: Draw) -> str:
    x = writable(d, has_dims(1, 2, 3))
    index = index_text(d, d.values[x])
    region = indexed(d.values[x], index)
    if d.chance(0.5):
        return written(d, x, f"{x}[{index}] = {d.number()}")
    dtype = dtype_name(d.values[x]) if d.chance(0.8) else None
    # One device follows integers, too, once a part of them has been set to what has a gradient.
    grad = None if has_gradient_dtype(d.values[x]) else False
    shape = tuple(region.shape) if d.chance(0.6) else ()
    y = d.input(shape, dtype, grad=grad)
    return written(d, x, f"{x}[{index}] = {y}")


@producer("data", 3)
def write_data(d: Draw) -> str:
    if d.wants_grad and d.lines:
        raise Refused  # what is saved for backward may be the tensor itself, or what it became
    x = writable(d)
    kind = d.weighted({"number": 3, "tensor": 2, "set": 2, "view": 2, "read": 1})
    if kind == "read":
        return f"{d.name()} = {x}.data"
    if kind == "view" and d.values[x].ndim:
        return f"{x}.data[{index_text(d, d.values[x])}] = {d.number()}"
    if kind == "set":
        value = d.values[x]
        if "[" in x or (value.requires_grad and not value.is_leaf):
            raise Refused
        y = d.input(tuple(value.shape), dtype_name(value), grad=False, strides="rows")
        return f"{x}.data = {y}.clone()"
    y = d.number() if kind == "number" else apart(d, x, d.beside(x))
    return f"{x}.data.{d.one(['add_', 'mul_', 'copy_', 'sub_'])}({y})"


@producer("writes", 2)
def write_through_a_view(d: Draw) -> str:
    x = writable(d, has_dims(2, 3))
    value = d.values[x]
    if value.is_leaf and value.requires_grad:
        raise Refused
    view = d.one(["view(-1)", "view(-1)", "flatten()", "diagonal()", "t()", "unbind(1)[0]", "mT"])
    name = d.name()
    y = d.number() if d.chance(0.7) else d.input((), dtype_name(value), grad=False)
    return f"{name} = {x}.{view}; {name}.{d.one(IN_PLACE)}({y})"
