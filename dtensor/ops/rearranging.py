"""Elements in other places of the same dims, repeated, rolled and turned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tensor.wrapper import Wrapper
from .engine.dims import without
from .engine.gathered import on_gathered
from .engine.rules import moving
from .engine.table import OpCall, Rule, decomposition, rule

aten = torch.ops.aten


@rule(aten.flip.default)
def flip_rule(call: OpCall) -> Rule:
    """Dims in reverse, which must be whole."""
    dims, _ = without(call.specs[0].ndim, *call.arg("dims"))
    return moving(call, (dims,), (dims,))


@rule(aten.roll.default)
def roll_rule(call: OpCall) -> Rule:
    """Dims turned around, which must be whole; without dims it is the flat tensor."""
    ndim = call.specs[0].ndim
    dims, _ = without(ndim, *(call.arg("dims") or range(ndim)))
    return moving(call, (dims,), (dims,))


@decomposition(aten.repeat.default)
def repeat(tensor: Tensor, repeats: Sequence[int]) -> Tensor:
    """Return copies side by side: a new dim before each repeated one, expanded and joined."""
    lead = len(repeats) - tensor.ndim
    sizes = [1] * lead + list(tensor.shape)
    final = [count * size for count, size in zip(repeats, sizes, strict=True)]
    if 0 in final:
        return tensor.new_empty(final)
    apart, repeated = list[int](), list[int]()
    for count, size in zip(repeats, sizes, strict=True):
        apart += [size] if count == 1 else [1, size]
        repeated += [size] if count == 1 else [count, size]
    expanded = tensor.reshape(apart).expand(repeated)
    # No view: the result is written to as any other tensor is.
    return aten._unsafe_view.default(expanded.clone(memory_format=torch.contiguous_format), final)


@decomposition(aten.roll.default)
def roll(tensor: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Return both sides of a cut in the other order, where the dim is cut over one axis."""
    if not all(_is_cut_once(tensor, dim) for dim in dims) or len(dims) != len(shifts) or not dims:
        return NotImplemented
    for shift, dim in zip(shifts, dims, strict=True):
        size = tensor.shape[dim]
        count = shift % max(size, 1)
        tail, head = tensor.narrow(dim, size - count, count), tensor.narrow(dim, 0, size - count)
        tensor = torch.cat([tail, head], dim)
    return tensor


def _is_cut_once(tensor: Tensor, dim: int) -> bool:
    return isinstance(tensor, Wrapper) and len(tensor.spec.layout.splits[dim]) == 1


@decomposition(aten.rot90.default)
def rot90(tensor: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Return a tensor turned by quarters: flipped, and its two dims exchanged if it is odd."""
    first, second = dims
    turns = k % 4
    if turns == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    if turns == 2:
        return tensor.flip(first, second)
    return tensor.flip(second if turns == 1 else first).transpose(first, second)


on_gathered(aten.repeat_interleave.Tensor)
