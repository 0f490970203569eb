"""Tensors distributed by torch and by us, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed.tensor as torch_tensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

import dtckpt.dtensor as our_tensor

from .frame.timing import OURS, PEER

Axis = int | None | Literal["sum"]
"""What a mesh axis does: cuts a tensor dim, replicates (None), or holds terms of a sum."""


class Distributed:
    """A library of DTensors, on one mesh."""

    def __init__(self, name: str, library: Any, mesh: Any) -> None:
        self.name = name
        self.mesh = mesh
        self._distribute, self._class = library.distribute_tensor, library.DTensor
        self._cut, self._replica, self._terms = library.Shard, library.Replicate, library.Partial

    def put(self, tensor: Tensor, *axes: Axis) -> Any:
        """Return ``tensor`` laid out, with what each axis of the mesh does."""
        return self._distribute(tensor, self.mesh, self.placements(axes), src_data_rank=None)

    def wrap(self, local: Tensor, shape: Sequence[int], *axes: Axis) -> Any:
        """Return the tensor of ``shape`` of which this rank holds ``local``."""
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        size, placements = torch.Size(shape), self.placements(axes)
        return self._class.from_local(
            local, self.mesh, placements, run_check=False, shape=size, stride=stride
        )

    def move(self, tensor: Any, *axes: Axis) -> Any:
        """Return the tensor laid out otherwise."""
        return tensor.redistribute(placements=self.placements(axes))

    def whole(self, tensor: Any) -> Tensor:
        """Return all of the tensor as a plain one."""
        return tensor.full_tensor()

    def placements(self, axes: Sequence[Axis]) -> list[Any]:
        """Return what the axes do as placements of the library."""
        return [self._placement(axis) for axis in axes]

    def _placement(self, axis: Axis) -> Any:
        if isinstance(axis, int):
            return self._cut(axis)
        return self._replica() if axis is None else self._terms(axis)


def both(mesh: TorchDeviceMesh) -> tuple[Distributed, Distributed]:
    """Return torch's tensors and ours, on the same process groups."""
    ours = our_tensor.DeviceMesh.from_torch(mesh)
    return Distributed(PEER, torch_tensor, mesh), Distributed(OURS, our_tensor, ours)
