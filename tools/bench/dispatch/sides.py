"""What an operator is measured on: plain tensors, torch's DTensors and ours, in one process.

The process is rank 0 of 16 whose communication is free: torch's fake process group, which all
meshes share. One mesh is of this rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..distributed import Axis, Distributed, both
from ..fake_job import join_fake_job

ALONE = 0
"""In the place of a number of axes: the mesh of one rank."""
MESHES = {ALONE: (1,), 1: (16,), 2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}
"""Meshes by their number of axes, of all ranks but for one."""


@dataclass(frozen=True, slots=True)
class Plain:
    """This rank's part alone, as a plain tensor: the work without any bookkeeping."""

    axes: int
    name: str = field(default="plain", init=False)

    def put(self, tensor: Tensor, *axes: Axis) -> Tensor:
        """Return the first part."""
        for cut, count in zip(axes, MESHES[self.axes], strict=True):
            if isinstance(cut, int):
                tensor = tensor.chunk(count, cut)[0]
        return tensor.clone(memory_format=torch.contiguous_format)

    def wrap(self, local: Tensor, shape: Sequence[int], *axes: Axis) -> Tensor:
        """Return a view, as the others wrap one."""
        del shape, axes
        return local.view_as(local)

    def move(self, tensor: Tensor, *axes: Axis) -> Tensor:
        """Return a copy: the least that a change of layout costs."""
        return self.put(tensor, *axes)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a copy of the part."""
        return tensor.clone()


Side = Plain | Distributed
"""One way to hold the tensors of a row."""


def sides() -> dict[int, tuple[Side, ...]]:
    """Return all sides by the number of mesh axes.

    This makes the job of the process the fake one.
    """
    join_fake_job()
    found: dict[int, tuple[Side, ...]] = {}
    for axes, shape in MESHES.items():
        names = tuple(f"axis{axis}" for axis in range(len(shape)))
        ranks = torch.arange(math.prod(shape)).view(shape)
        found[axes] = (Plain(axes), *both(DeviceMesh("cpu", ranks, mesh_dim_names=names)))
    return found
