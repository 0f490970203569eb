"""The mesh that a call means where it names none."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError

from ..torch_private import without_stand_in
from .device_mesh import DeviceMesh
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
