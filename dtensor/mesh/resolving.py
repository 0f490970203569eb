"""The mesh that a call means where it names none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError

from ..torch_private import without_stand_in
from .default_group import join_or_be_alone
from .device_mesh import DeviceMesh, init_device_mesh
from .modes import active_mesh

AnyMesh = DeviceMesh | TorchDeviceMesh
"""A mesh of ours or of torch."""


def resolve_mesh(mesh: AnyMesh | None) -> DeviceMesh:
    """Return the mesh given, a wrapped torch mesh, or the active one for None."""
    mesh = without_stand_in(mesh)
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, TorchDeviceMesh):
        return DeviceMesh.from_torch(mesh)
    if mesh is not None:
        raise PlacementError(
            f"expected a DeviceMesh, got {mesh!r} of type {type(mesh).__name__}; make one by "
            'init_device_mesh, and take a part of it by the names of its axes: mesh["tp"]'
        )
    found = active_mesh()
    if not isinstance(found, DeviceMesh):
        raise PlacementError("no mesh: pass device_mesh, or enter one with 'with mesh:'")
    return found


def mesh_of_all_ranks() -> DeviceMesh:
    """Return the mesh of one dim over all ranks of the default process group.

    Its device type is that of the current accelerator, or the CPU where there is none. Without a
    default group, torch.distributed is initialised as by ``init_device_mesh``. The first call is
    collective. Later calls return the same mesh, until the default group is another one.
    """
    join_or_be_alone((1,))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    # A strong reference: whether a mesh is made, which is collective, must not depend on when
    # the garbage collector of a rank has run.
    global _all_ranks
    group, mesh = _all_ranks or (None, None)
    if mesh is None or group is not dist.group.WORLD or mesh.device_type != device_type:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        _all_ranks = dist.group.WORLD, mesh
    return mesh


_all_ranks: tuple[Any, DeviceMesh] | None = None
"""The default process group, and the mesh over all its ranks."""
