"""Ways to a device mesh: over the whole job, around a torch mesh, or the active one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError

from .device_mesh import DeviceMesh
from .integers import ints
from .interop import mesh_from_torch
from .mesh import Mesh
from .mesh_agreement import require_same_mesh
from .modes import active_mesh

_OURS: dict[int, tuple[ref[TorchDeviceMesh], DeviceMesh]] = {}
"""Our mesh for a torch mesh, for as long as that lives, and with it seeds, counts and groups: what
the garbage collector does on one rank must not make that rank begin anew. By identity: torch
compares meshes by value, and an equal one of a job that was initialised anew has other groups."""
_LOCK = threading.RLock()


class _Theirs:
    """The torch mesh of one of ours, while anybody has it; else the two would never be let go."""

    def __init__(self) -> None:
        self.mesh: Callable[[], TorchDeviceMesh | None] = lambda: None


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Return the mesh of ranks 0, 1, 2, ... of the whole job in row-major order.

    Initialises torch.distributed from the environment where nobody has. Every rank must pass the
    same arguments: they are compared, and a difference raises PlacementError on every rank.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    require_same_mesh(device_type, f"{device_type!r} {mesh_shape!r} {mesh_dim_names!r}")
    mesh = Mesh(ints(mesh_shape, "the shape of a mesh"), tuple(mesh_dim_names or ()))
    if mesh.size != dist.get_world_size():
        raise PlacementError(
            f"a mesh of shape {mesh.shape} has {mesh.size} ranks, but the job has "
            f"{dist.get_world_size()}"
        )
    made = DeviceMesh(device_type, mesh, rank=dist.get_rank())
    _ = made.device  # selected now, in this thread and before any group is made
    return made


def device_mesh_from_torch(torch_mesh: TorchDeviceMesh) -> DeviceMesh:
    """Return a mesh around a torch mesh, with its process groups; one object for one torch mesh."""
    with _LOCK:
        theirs, ours = _OURS.get(id(torch_mesh), (None, None))
        if theirs is not None and ours is not None and theirs() is torch_mesh:
            return ours
        made = DeviceMesh(
            torch_mesh.device_type,
            mesh_from_torch(torch_mesh),
            rank=_rank_of(torch_mesh),
            groups=_groups_of(torch_mesh),
        )
        _pair(torch_mesh, made)
        return made


def _pair(torch_mesh: TorchDeviceMesh, mesh: DeviceMesh) -> None:
    key = id(torch_mesh)

    def forget(dead: ref[TorchDeviceMesh]) -> None:
        with _LOCK:  # the number may be another mesh's by now
            if _OURS.get(key, (None,))[0] is dead:
                del _OURS[key]

    theirs = ref(torch_mesh, forget)
    _OURS[key] = (theirs, mesh)
    mesh.cache("torch_mesh", _Theirs).mesh = theirs


def _rank_of(torch_mesh: TorchDeviceMesh) -> int | None:
    if dist.is_initialized():
        return dist.get_rank()
    return getattr(torch_mesh, "_cur_rank", None)


def _groups_of(torch_mesh: TorchDeviceMesh) -> list[Any] | None:
    if not dist.is_initialized() or torch_mesh.get_coordinate() is None:
        return None
    try:
        return torch_mesh.get_all_groups()
    except RuntimeError:  # made without a backend: groups are then made when they are needed
        return None


def torch_mesh_of(mesh: DeviceMesh) -> TorchDeviceMesh:
    """Return a torch mesh with the process groups of ``mesh``, the wrapped one if there is one.

    It is the same one until nobody else has it.
    """
    held = mesh.cache("torch_mesh", _Theirs)
    found = held.mesh()
    if found is None:
        made = _make_torch_mesh(mesh)
        with _LOCK:
            found = held.mesh()
            if found is None:
                found = made
                _pair(made, mesh)
    return found


def _make_torch_mesh(mesh: DeviceMesh) -> TorchDeviceMesh:
    if not dist.is_initialized() or mesh.get_coordinate() is None:
        return _torch_mesh_without_groups(mesh)
    groups = cast("list[dist.ProcessGroup]", mesh.get_all_groups())
    return TorchDeviceMesh.from_group(
        groups if mesh.ndim > 1 else groups[0],
        mesh.device_type,
        mesh=mesh.mesh,
        mesh_dim_names=mesh.mesh_dim_names,
    )


def _torch_mesh_without_groups(mesh: DeviceMesh) -> TorchDeviceMesh:
    try:
        return TorchDeviceMesh(
            mesh.device_type,
            mesh.mesh,
            mesh_dim_names=mesh.mesh_dim_names,
            _init_backend=False,
            _rank=mesh.get_rank(),
        )
    except TypeError as error:  # these parameters are private
        raise PlacementError(
            f"this torch ({torch.__version__}) makes no mesh without a process group: initialise "
            "torch.distributed first"
        ) from error


def resolve_mesh(mesh: DeviceMesh | TorchDeviceMesh | None) -> DeviceMesh:
    """Return the mesh given, a wrapped torch mesh, or the active one for None."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is not None:
        return device_mesh_from_torch(mesh)
    found = active_mesh()
    if found is None:
        raise PlacementError("no mesh: pass device_mesh, or enter one with 'with mesh:'")
    return found
