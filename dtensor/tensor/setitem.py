"""``x[index] = value``: every rank writes what it has of the place, in the memory of the tensor.

An index of integers and slices is a box. Where each dim is cut over one mesh axis at most, the part
of the box that a rank has is a view of its memory. Otherwise, and where autograd follows, the
tensor gets its values back with the box replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .autograd import is_followed
from .wrapper import Wrapper

aten = torch.ops.aten

Entry = int | slice | None | Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """An index by its entries, without an ellipsis, and the dims that they are for."""

    entries: tuple[Entry, ...]
    dims: tuple[int, ...]

    @property
    def has_tensors(self) -> bool:
        """Whether it is more than a box."""
        return any(isinstance(entry, Tensor) for entry in self.entries)

    def box(self, shape: Sequence[int]) -> list[slice]:
        """Return the range of every dim."""
        ranges = [slice(0, size, 1) for size in shape]
        for entry, dim in zip(self.entries, self.dims, strict=True):
            if isinstance(entry, int):
                start = entry % shape[dim]
                ranges[dim] = slice(start, start + 1, 1)
            elif isinstance(entry, slice):
                ranges[dim] = slice(*entry.indices(shape[dim]))
        return ranges

    def without_tensors(self) -> tuple[tuple[Entry, ...], list[Tensor | None]]:
        """Return the box that the tensors index, and what they index it with."""
        basic, indices = list[Entry](), list[Tensor | None]()
        for entry in self.entries:
            if isinstance(entry, Tensor):
                basic.extend([slice(None)] * (entry.ndim if _is_mask(entry) else 1))
                indices.append(entry)
            else:
                basic.append(entry)
                if not isinstance(entry, int):
                    indices.append(None)
        return tuple(basic), indices


def set_item(tensor: Wrapper, index: Any, value: Any) -> bool:
    """Write to a part of a distributed tensor; False where torch's own way does it as well.

    Raises PlacementError, as operators do, where ``value`` is a plain tensor that differs between
    ranks.
    """
    place = _parsed(index, tensor)
    if place is None:
        return False
    follows = is_followed(tensor) or (isinstance(value, Tensor) and is_followed(value))
    if follows:
        _ = tensor.grad_fn  # a view whose tensor was written since is a leaf until somebody asks
    if place.has_tensors:
        basic, indices = place.without_tensors()
        if all(entry == slice(None) for entry in basic):
            return False
        part = tensor[basic]
        given = value if isinstance(value, Tensor) else part.new_full((), value)
        set_item(tensor, basic, aten.index_put(part, indices, given.to(part.dtype)))
        return True
    tensor, box = _without_repeats(tensor, place.box(tensor.shape))
    layout = tensor.spec.layout
    is_view = all(len(cuts) <= 1 for cuts in layout.splits) and not layout.is_dealt
    ranges = [range(size)[part] for size, part in zip(tensor.shape, box, strict=True)]
    # After x[i] += y it is the very place. Kernels refuse that for some strides, which may be those
    # of one rank alone. What autograd follows is copied on all ranks: by a node that one rank alone
    # has it would go through the graph in another order, and to other collectives first.
    given = value.clone() if _is_followed(value) or _shares_memory(value, tensor) else value
    # An expanded tensor takes no write, but one of no element, after which autograd follows it.
    if (is_view and not follows) or (follows and not all(ranges)):
        view = tensor[tuple(box)]
        view.copy_(_shaped(given, place, view))
    else:
        replaced = _replaced(tensor, place, box, 0, given)
        if all(ranges):
            tensor.copy_(replaced)
    return True


def _without_repeats(tensor: Wrapper, box: list[slice]) -> tuple[Wrapper, list[slice]]:
    """Return what has memory of its own in an expanded tensor, and the box in that.

    A box of two elements in one place of memory stays, and is refused when it is written.
    """
    for dim in tensor.spec.expanded_dims:
        here = range(tensor.shape[dim])[box[dim]]
        if len(here) == 1 and not tensor.spec.layout.splits[dim]:
            tensor = aten.slice(tensor, dim, here[0], here[0] + 1)
            box[dim] = slice(0, 1, 1)
    return tensor, box


def _is_followed(value: Any) -> bool:
    return isinstance(value, Wrapper) and is_followed(value)


def _shares_memory(value: Any, tensor: Wrapper) -> bool:
    if not isinstance(value, Wrapper):
        return False
    memories = [t.local.untyped_storage() for t in (value, tensor)]
    return memories[0].data_ptr() == memories[1].data_ptr()


def _parsed(index: Any, tensor: Tensor) -> Place | None:
    given = [_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    if any(entry is NotImplemented for entry in given):
        return None
    num_dims = sum(_num_dims(entry) for entry in given)
    rest = [slice(None)] * (tensor.ndim - num_dims)
    at = next((i for i, entry in enumerate(given) if entry is Ellipsis), len(given))
    entries = [*given[:at], *rest, *given[at + 1 :]]
    dims, dim = list[int](), 0
    for entry in entries:
        dims.append(dim)
        dim += _num_dims(entry)
    fits = dim == tensor.ndim and all(
        -tensor.shape[d] <= e < tensor.shape[d]
        for e, d in zip(entries, dims, strict=True)
        if isinstance(e, int)
    )
    steps = all((e.step or 1) > 0 for e in entries if isinstance(e, slice))
    return Place(tuple(entries), tuple(dims)) if fits and steps else None


def _entry(entry: Any) -> Any:
    """Return an entry as torch reads it; NotImplemented for the rarer kinds."""
    if isinstance(entry, list):
        entry = torch.tensor(cast(list[Any], entry))
    if isinstance(entry, Tensor):
        is_number = entry.ndim == 0 and not _is_mask(entry)
        return int(entry) if is_number else entry if entry.ndim else NotImplemented
    is_basic = entry is None or entry is Ellipsis or isinstance(entry, int | slice)
    return entry if is_basic and not isinstance(entry, bool) else NotImplemented


def _num_dims(entry: Any) -> int:
    if isinstance(entry, Tensor) and _is_mask(entry):
        return entry.ndim
    return 0 if entry is None or entry is Ellipsis else 1


def _is_mask(entry: Tensor) -> bool:
    return entry.dtype in (torch.bool, torch.uint8)


def _shaped(value: Any, place: Place, part: Tensor) -> Tensor:
    """Return a value in the shape of a box, in which dims that have an integer are of size 1."""
    if not isinstance(value, Tensor):
        return torch.full_like(part, value)
    shape = [
        1 if entry is None else part.shape[dim]
        for entry, dim in zip(place.entries, place.dims, strict=True)
        if not isinstance(entry, int)
    ]
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value.squeeze(0)
    return value.to(part.dtype).expand(shape).reshape(part.shape)


def _replaced(tensor: Tensor, place: Place, box: Sequence[slice], dim: int, value: Any) -> Tensor:
    """Return the tensor with the box replaced, from ``dim`` on."""
    if dim == len(box):
        return _shaped(value, place, tensor)
    start, stop, step = box[dim].start, box[dim].stop, box[dim].step
    if (start, stop, step) == (0, tensor.shape[dim], 1):
        return _replaced(tensor, place, box, dim + 1, value)
    part = aten.slice(tensor, dim, start, stop, step)
    made = _replaced(part, place, box, dim + 1, value)
    if not tensor.is_complex():
        return aten.slice_scatter(tensor, made, dim, start, stop, step)
    # Torch has no gradient of the complex one.
    whole, made = (torch.view_as_real(x.resolve_conj()) for x in (tensor, made))
    return torch.view_as_complex(aten.slice_scatter(whole, made, dim, start, stop, step))
