"""What fills this rank's part of a tensor: with numbers of a distribution, or in a random order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..geometry.box import Box
from ..graphs.calls import record
from ..mesh.spec import DTensorSpec
from ..torch_private import can_leave_modes, has_modes, has_no_values, is_traced, outside_modes
from . import samplers
from .counter_rng import Sampler, Words, fill, scattered_indices
from .draws import draws_of
from .kept import scratch_of
from .shuffling import order_of

MAX_KEPT = 1024
"""Elements of a tensor on the CPU whose scattered numbers are kept with its plan.

On other devices they would be made on one stream and read on others, with nothing in between."""


def check_parameters(method: str, dtype: torch.dtype, *parameters: Any) -> None:
    """Raise what torch raises for the dtype and the parameters, which it finds out as it draws."""
    with outside_modes() if has_modes() else nullcontext():
        getattr(torch.empty(1, dtype=dtype), method)(*parameters, generator=torch.Generator())


def drawer(spec: DTensorSpec, sampler: Sampler) -> Callable[[Tensor], None]:
    """Return what fills this rank's part of a tensor of ``spec``: one draw a call."""
    mesh, shape, parts = spec.mesh, tuple(spec.shape), spec.parts()
    draws, kept, box = draws_of(mesh), None, parts[0][0] if len(parts) == 1 else None
    if mesh.device_type == "cpu" and box is not None and 0 < box.numel <= MAX_KEPT:
        kept = _scattered(shape, box)

    def draw(local: Tensor) -> None:
        if is_traced(local):
            told = f"draw {spec} by {sampler.__name__}"
            local.copy_(record(draw, told, [local], drawn, _empty_like)[0])
            return
        if local.is_meta:
            return
        keys = draws.next(mesh)
        if box is not None and kept is not None and local.is_contiguous():
            sampler(Words(kept, keys, scratch_of(box.sizes)), local)
        elif box is not None:
            fill(local, shape, box, keys, sampler)
        else:
            for held, place in parts:
                fill(local[place.slices], shape, held, keys, sampler)

    def drawn(like: list[Tensor]) -> list[Tensor]:
        made = _empty_like(like)
        draw(made[0])
        return made

    return draw


def _empty_like(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _scattered(shape: tuple[int, ...], box: Box) -> Tensor | None:
    if not can_leave_modes():
        return None
    with outside_modes():
        return scattered_indices(shape, box, torch.device("cpu")).view(box.sizes)


def permuter(spec: DTensorSpec) -> Callable[[Tensor], None]:
    """Return what writes this rank's part of a random order of all indices: one draw a call."""
    mesh, (count,), parts = spec.mesh, spec.shape, spec.parts()

    def draw(local: Tensor) -> None:
        if has_no_values(local):
            return
        keys = draws_of(mesh).next(mesh)
        if not local.numel():
            return
        words = torch.empty(count, dtype=torch.int64, device=local.device)
        fill(words, (count,), Box.whole((count,)), keys, samplers.words)
        order = order_of(words)
        for held, place in parts:
            local[place.slices].copy_(order[held.slices])

    return draw
