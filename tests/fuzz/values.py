"""Values and memory of inputs: the whole on one device, and the part of each rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, distribute_tensor
from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.dtensor.geometry.mesh import Mesh
from dtckpt.dtensor.geometry.placement import parse_placements
from tests.dtensor.oracle import local_array

from .program import BY_PARTS, UNTOLD, Input

SENTINEL = 77
"""What fills the rest of a buffer of which an input is a part."""


def whole_values(given: Input) -> Tensor:
    """Return the values of an input in rows."""
    is_expanded = given.strides == "expanded"
    found = _whole(given.shape, given.dtype, given.values, given.seed, is_expanded)
    # Terms of a zero have no sign that their sum could keep.
    has_signs = found.dtype.is_floating_point or found.dtype.is_complex
    return found + 0 if "P(" in given.placements and has_signs else found


def _is_told_by_parts(layout: Layout) -> bool:
    """Whether parts alone tell the whole shape: a Shard has to cut as torch does."""
    return all(p.is_replicate() or p.is_shard() for p in layout.placements)


@lru_cache(2048)
def _whole(
    shape: tuple[int, ...], dtype_name: str, values: str, seed: int, is_expanded: bool
) -> Tensor:
    if is_expanded and shape:
        row = _whole(shape[1:], dtype_name, values, seed, False)
        return row.expand(shape).contiguous()
    numel = torch.Size(shape).numel()
    dtype: torch.dtype = getattr(torch, dtype_name)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(numel)).double()
    if values == "zeros":
        made = torch.zeros(numel, dtype=torch.float64)
    elif values == "ones":
        made = torch.ones(numel, dtype=torch.float64)
    elif values == "positive":
        made = (order + 1) / 8
    elif values == "unit":
        made = (order + 1) / (numel + 1)
    elif values.startswith("below"):  # whole numbers below a bound, as indices are
        made = order % int(values.removeprefix("below"))
    else:
        made = (order - numel // 2) / 8
        if values == "special" and numel:
            for place, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0)):
                made[(place * 7 + seed) % numel] = value
    if dtype.is_complex:
        made = torch.complex(made, made.flip(0) / 2 + 0.25)
    elif not dtype.is_floating_point and values in ("mixed", "special", "positive", "unit"):
        made = order % 11 if values in ("positive", "unit") else order % 9 - 3
        if dtype == torch.bool:
            made = order % 2
        elif dtype == torch.uint8:
            made = order % 13
    return made.to(dtype).view(shape)


def in_memory(values: Tensor, strides: str) -> tuple[Tensor, Tensor]:
    """Return a tensor of these values that lies as told, and what lies beside it in its buffer."""
    shape = tuple(values.shape)
    rest = values.new_empty(0)
    if strides == "transposed" and len(shape) > 1:
        made = torch.empty(shape[::-1], dtype=values.dtype).permute(*reversed(range(len(shape))))
    elif strides == "stepped" and shape:
        made, rest = torch.full((*shape, 2), SENTINEL).to(values.dtype).unbind(-1)
    elif strides == "stepped_rows" and shape:
        buffer = torch.full((2 * shape[0], *shape[1:]), SENTINEL).to(values.dtype)
        made, rest = buffer[::2], buffer[1::2]
    elif strides == "offset":
        buffer = torch.full((values.numel() + 3,), SENTINEL).to(values.dtype)
        made, rest = buffer[3:].view(shape), buffer[:3]
    elif strides == "expanded" and shape and shape[0]:
        return values[:1].clone().expand(shape), rest
    else:
        made = torch.empty(shape, dtype=values.dtype)
    made.copy_(values)
    return made.detach(), rest


def plain_input(given: Input) -> tuple[Tensor, Tensor]:
    """Return an input on one device, and what lies beside it."""
    strides = "rows" if given.made_by == UNTOLD else given.strides
    made, buffer = in_memory(whole_values(given), strides)
    return (made.requires_grad_() if given.grad else made), buffer


def distributed_input(given: Input, mesh: DeviceMesh) -> tuple[Any, Tensor]:
    """Return one rank's DTensor of an input, and what lies beside its local part."""
    layout = layout_of(mesh.shape, given.placements, given.shape)
    local, buffer = in_memory(part_of(given, layout, mesh.get_coordinate() or ()), given.strides)
    if given.made_by == "distribute_tensor":
        made = distribute_tensor(whole_values(given).clone(), mesh, layout.placements)
    elif given.made_by == BY_PARTS and _is_told_by_parts(layout):
        made = DTensor.from_local(local, mesh, layout.placements)
    else:
        stride = None if given.made_by == UNTOLD else plain_input(given)[0].stride()
        made = DTensor.from_local(local, mesh, layout.placements, shape=given.shape, stride=stride)
    return (made.detach().requires_grad_() if given.grad else made), buffer


@lru_cache(4096)
def layout_of(mesh: tuple[int, ...], placements: str, shape: tuple[int, ...]) -> Layout:
    """Return the layout that a text of placements stands for."""
    return Layout(Mesh(mesh), parse_placements(placements), shape)


@lru_cache(8192)
def part_of(given: Input, layout: Layout, here: tuple[int, ...]) -> Tensor:
    """Return the values that a coordinate holds; terms that differ for a Partial."""
    whole = whole_values(given)
    part = whole.view(-1)[indices_of(layout, here)]
    for axis, placement in enumerate(layout.placements):
        op = getattr(placement, "reduce_op", None)
        if op is not None:
            part = _term(part, op, here[axis], layout.mesh.shape[axis])
    return part


@lru_cache(8192)
def indices_of(layout: Layout, here: tuple[int, ...]) -> Tensor:
    """Return which elements of the whole, counted in rows, a coordinate holds, in its order."""
    numbers = np.arange(torch.Size(layout.shape).numel()).reshape(layout.shape)
    return torch.from_numpy(np.array(local_array(layout, here, numbers)))


def _term(part: Tensor, op: str, index: int, count: int) -> Tensor:
    if op == "product":
        return part if index == 0 else torch.ones_like(part)
    if op == "sum":
        if part.dtype == torch.bool:
            return part if index == 0 else torch.zeros_like(part)
        rest = count * (count - 1) // 2
        return part - rest if index == 0 else torch.full_like(part, index)
    if op == "avg":
        return part + (index - (count - 1) / 2)
    if part.dtype in (torch.bool, torch.uint8):
        return part
    return part + (index if op == "min" else -index)
