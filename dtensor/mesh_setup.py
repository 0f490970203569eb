"""Ways to a device mesh: over the whole job, around a torch mesh, or the active one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError

from .device_mesh import DeviceMesh
from .groups import BackendOverride
from .integers import ints
from .interop import mesh_from_torch
from .job import join_or_be_alone
from .mesh import Mesh
from .mesh_agreement import require_same_mesh
from .modes import active_mesh
from .torch_mesh import our_mesh_of
from .torch_private import rank_of_torch_mesh


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, BackendOverride] | None = None,
) -> DeviceMesh:
    """Return the mesh of ranks 0, 1, 2, ... of the job in row-major order.

    It may have fewer ranks than the job; the others are outside of it, and call this, too.
    Initialises torch.distributed from the environment where nobody has; without a launcher, for a
    mesh of one rank, with a group of this process alone. Every rank must pass the same arguments:
    they are compared, and a difference raises PlacementError on every rank.

    ``backend_override`` has, by name or index of an axis, the backend of the process group along it
    ("gloo"), its options, or both in a tuple.
    """
    if not dist.is_initialized():
        join_or_be_alone(ints(mesh_shape, "the shape of a mesh"))
    told = sorted((str(axis), _backend_name(b)) for axis, b in (backend_override or {}).items())
    require_same_mesh(device_type, f"{device_type!r} {mesh_shape!r} {mesh_dim_names!r} {told}")
    mesh = Mesh(ints(mesh_shape, "the shape of a mesh"), tuple(mesh_dim_names or ()))
    if mesh.size > dist.get_world_size():
        raise PlacementError(
            f"a mesh of shape {mesh.shape} has {mesh.size} ranks, but the job has "
            f"{dist.get_world_size()}"
        )
    made = DeviceMesh(device_type, mesh, rank=dist.get_rank(), backend_override=backend_override)
    if made.get_coordinate() is not None:
        _ = made.device  # selected now, in this thread and before any group is made
    return made


def _backend_name(backend: BackendOverride) -> str:
    """Return what is the same on all ranks: options have no text of their own."""
    given: Any = backend[0] if isinstance(backend, tuple) else backend
    return given if isinstance(given, str) else type(given).__name__


def device_mesh_from_torch(torch_mesh: TorchDeviceMesh) -> DeviceMesh:
    """Return a mesh around a torch mesh, with its process groups; one object for one torch mesh.

    A mesh of ours is returned as it is.
    """
    if isinstance(torch_mesh, DeviceMesh):
        return torch_mesh

    def make() -> DeviceMesh:
        return DeviceMesh(
            torch_mesh.device_type,
            mesh_from_torch(torch_mesh),
            rank=_rank_of(torch_mesh),
            groups=_groups_of(torch_mesh),
        )

    return our_mesh_of(torch_mesh, make)


def _rank_of(torch_mesh: TorchDeviceMesh) -> int | None:
    if dist.is_initialized():
        return dist.get_rank()
    return rank_of_torch_mesh(torch_mesh)


def _groups_of(torch_mesh: TorchDeviceMesh) -> list[Any] | None:
    if not dist.is_initialized() or torch_mesh.get_coordinate() is None:
        return None
    try:
        return torch_mesh.get_all_groups()
    except RuntimeError:  # made without a backend: groups are then made when they are needed
        return None


def resolve_mesh(mesh: DeviceMesh | TorchDeviceMesh | None) -> DeviceMesh:
    """Return the mesh given, a wrapped torch mesh, or the active one for None."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is not None:
        return device_mesh_from_torch(mesh)
    found = active_mesh()
    if not isinstance(found, DeviceMesh):
        raise PlacementError("no mesh: pass device_mesh, or enter one with 'with mesh:'")
    return found
