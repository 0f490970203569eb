"""What an operator is measured on: plain tensors, torch's DTensors and ours, in one process.

The process is rank 0 of 16 whose communication is free: torch's fake process group, which all
meshes share. One mesh is of this rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed.tensor as torch_tensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from ..fake_job import join_fake_job
from ..timing import OURS, PEER

ALONE = 0
"""In the place of a number of axes: the mesh of one rank."""
MESHES = {ALONE: (1,), 1: (16,), 2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}
"""Meshes by their number of axes, of all ranks but for one."""

Cut = int | None
"""The tensor dim that an axis cuts, or None where it replicates."""


class Side(Protocol):
    """One way to hold the tensors of a row."""

    @property
    def name(self) -> str:
        """Heading of its column."""
        ...

    def put(self, tensor: Tensor, *cuts: Cut) -> Tensor:
        """Return ``tensor`` laid out, one cut per axis of the mesh."""
        ...

    def wrap(self, local: Tensor, shape: Sequence[int], *cuts: Cut) -> Tensor:
        """Return the tensor of ``shape`` of which this rank holds ``local``."""
        ...

    def move(self, tensor: Tensor, *cuts: Cut) -> Tensor:
        """Return the tensor laid out otherwise."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all of the tensor as a plain one."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """This rank's part alone, as a plain tensor: the work without any bookkeeping."""

    axes: int
    name: str = field(default="plain", init=False)

    def put(self, tensor: Tensor, *cuts: Cut) -> Tensor:
        """Return the first part."""
        for cut, count in zip(cuts, MESHES[self.axes], strict=True):
            if cut is not None:
                tensor = tensor.chunk(count, cut)[0]
        return tensor.clone(memory_format=torch.contiguous_format)

    def wrap(self, local: Tensor, shape: Sequence[int], *cuts: Cut) -> Tensor:
        """Return a view, as the others wrap one."""
        del shape, cuts
        return local.view_as(local)

    def move(self, tensor: Tensor, *cuts: Cut) -> Tensor:
        """Return a copy: the least that a change of layout costs."""
        return self.put(tensor, *cuts)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a copy of the part."""
        return tensor.clone()


class Torch:
    """``torch.distributed.tensor``."""

    name = PEER

    def __init__(self, mesh: TorchDeviceMesh) -> None:
        self.mesh = mesh

    def put(self, tensor: Tensor, *cuts: Cut) -> Tensor:
        """Return a DTensor of torch."""
        placements = self._placements(cuts)
        return torch_tensor.distribute_tensor(tensor, self.mesh, placements, src_data_rank=None)

    def wrap(self, local: Tensor, shape: Sequence[int], *cuts: Cut) -> Tensor:
        """Return it by ``from_local`` without any exchange."""
        size, stride = torch.Size(shape), _strides(shape)
        return torch_tensor.DTensor.from_local(
            local, self.mesh, self._placements(cuts), run_check=False, shape=size, stride=stride
        )

    def move(self, tensor: Any, *cuts: Cut) -> Tensor:
        """Return it by ``redistribute``."""
        return tensor.redistribute(placements=self._placements(cuts))

    def whole(self, tensor: Any) -> Tensor:
        """Return it by ``full_tensor``."""
        return tensor.full_tensor()

    @staticmethod
    def _placements(cuts: Sequence[Cut]) -> list[Any]:
        return [torch_tensor.Replicate() if c is None else torch_tensor.Shard(c) for c in cuts]


class Ours:
    """``dtckpt.dtensor``."""

    name = OURS

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def put(self, tensor: Tensor, *cuts: Cut) -> Tensor:
        """Return a DTensor of ours."""
        placements = self._placements(cuts)
        return distribute_tensor(tensor, self.mesh, placements, src_data_rank=None)

    def wrap(self, local: Tensor, shape: Sequence[int], *cuts: Cut) -> Tensor:
        """Return it by ``from_local`` without any exchange."""
        placements, stride = self._placements(cuts), _strides(shape)
        return DTensor.from_local(local, self.mesh, placements, shape=shape, stride=stride)

    def move(self, tensor: Any, *cuts: Cut) -> Tensor:
        """Return it by ``redistribute``."""
        return tensor.redistribute(placements=self._placements(cuts))

    def whole(self, tensor: Any) -> Tensor:
        """Return it by ``full_tensor``."""
        return tensor.full_tensor()

    @staticmethod
    def _placements(cuts: Sequence[Cut]) -> list[Any]:
        return [Replicate() if c is None else Shard(c) for c in cuts]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def sides() -> dict[int, tuple[Side, ...]]:
    """Return all sides by the number of mesh axes.

    This makes the job of the process the fake one.
    """
    join_fake_job()
    found: dict[int, tuple[Side, ...]] = {}
    for axes, shape in MESHES.items():
        names = tuple(f"axis{axis}" for axis in range(len(shape)))
        ranks = torch.arange(math.prod(shape)).view(shape)
        mesh = TorchDeviceMesh("cpu", ranks, mesh_dim_names=names)
        found[axes] = (Plain(axes), Torch(mesh), Ours(DeviceMesh.from_torch(mesh)))
    return found
