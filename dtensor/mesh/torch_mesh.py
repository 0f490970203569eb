"""Our meshes in the eyes of torch, whose code takes them for its own.

``DeviceMesh`` is a subclass of torch's. What torch's code reads beyond the public methods is looked
up on a torch mesh of the same ranks and process groups, which is made when it is first needed and
which ``DeviceMesh.to_torch`` hands out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError

from ..comm.groups import ranks_of
from ..geometry.mesh import Mesh
from ..torch_private import MESH_FIELDS, torch_mesh_without_groups

T = TypeVar("T", bound="TorchMesh")

_LOCK = threading.RLock()
_OURS: dict[int, tuple[ref[TorchDeviceMesh], Any]] = {}
"""Our mesh for a torch mesh, for as long as that lives, and with it seeds, counts and groups: what
the garbage collector does on one rank must not make that rank begin anew. By identity: torch
compares meshes by value, and an equal one of a job that was initialised anew has other groups."""


def mesh_from_torch(torch_mesh: TorchDeviceMesh) -> Mesh:
    """Return the shape, ranks and axis names of a torch mesh; no process group is touched."""
    ours = getattr(torch_mesh, "layout_mesh", None)
    if isinstance(ours, Mesh):  # it is a DeviceMesh of ours
        return ours
    ranks = torch_mesh.mesh
    names = torch_mesh.mesh_dim_names
    shape = tuple(ranks.shape)
    return Mesh(shape, tuple(names) if names else (), tuple(ranks.flatten().tolist()))


class TorchMesh(TorchDeviceMesh):
    """What torch's code finds on a mesh of ours; a base of ``DeviceMesh``."""

    layout_mesh: Mesh
    their_mesh: Callable[[], TorchDeviceMesh | None] = staticmethod(lambda: None)
    """Answers with torch's mesh, if there is one."""
    _parent: Any

    def to_torch(self) -> TorchDeviceMesh:
        """Return torch's mesh of the same ranks, names and process groups; always the same one.

        Makes the groups that there are not yet, which is collective. PlacementError where torch has
        no such mesh: where a group has its ranks in another order than the mesh.
        """
        found = self.their_mesh()
        if found is None:
            made = self._sliced() or _made(self)
            with _LOCK:
                found = self.their_mesh()
                if found is None:
                    found = made
                    pair(found, self)
                    # Handed to torch, it lasts: nobody can tell who has which of the two.
                    self.their_mesh = lambda: made
        return found

    def _sliced(self) -> TorchDeviceMesh | None:
        """Return the part of the root's torch mesh, where torch can name it."""
        if self._parent is None or not dist.is_initialized():
            return None  # torch cuts its meshes by the groups that they have
        parent, parts = self._parent
        axes = [axis for part in parts for axis in part]
        names = tuple(parent.layout_mesh.axis_names[axis] for axis in axes)
        is_part = axes == sorted(set(axes)) and len(axes) == len(parts)
        if not is_part or names != self.layout_mesh.axis_names or parent.mesh_dim_names is None:
            return None
        return parent.to_torch()[names]

    @property
    def _coordinate_on_dim(self) -> tuple[int, ...] | None:
        return self.get_coordinate()

    @property
    def _mesh_dim_names(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> tuple[str, ...] | None:
        return self.mesh_dim_names


def _theirs(name: str) -> property:
    """Return what is looked up on torch's mesh, also where torch's class has a default for it."""
    return property(lambda mesh: getattr(mesh.to_torch(), name))


# No other name: a look for an unknown one, as by a notebook, must not make process groups.
for _name in MESH_FIELDS:
    setattr(TorchMesh, _name, _theirs(_name))


def our_mesh_of(torch_mesh: TorchDeviceMesh, make: Callable[[], T]) -> T:
    """Return the mesh of ours that stands for a torch mesh, made on first use."""
    with _LOCK:
        theirs, ours = _OURS.get(id(torch_mesh), (None, None))
        if theirs is not None and theirs() is torch_mesh:
            return cast(T, ours)
        made = make()
        pair(torch_mesh, made)
        return made


def pair(torch_mesh: TorchDeviceMesh, mesh: TorchMesh) -> None:
    """Let a torch mesh and one of ours stand for each other, while anybody has torch's."""
    key = id(torch_mesh)
    mesh.their_mesh = theirs = ref(torch_mesh)
    _OURS[key] = (theirs, mesh)
    # Unlike the callback of a reference it is not run when the names of this module are gone.
    finalize(torch_mesh, _forget, key).atexit = False


def _forget(key: int) -> None:
    with _LOCK:
        theirs, _ = _OURS.get(key, (None, None))
        if theirs is not None and theirs() is None:  # else the number is another mesh's by now
            del _OURS[key]


def _made(mesh: TorchMesh) -> TorchDeviceMesh:
    if not dist.is_initialized() or mesh.get_coordinate() is None:
        return _without_groups(mesh)
    groups = mesh.get_all_groups()
    for axis, group in enumerate(groups):
        _require_order(mesh, axis, group)
    return TorchDeviceMesh.from_group(
        groups if mesh.ndim > 1 else groups[0],
        mesh.device_type,
        mesh=mesh.mesh,
        mesh_dim_names=mesh.layout_mesh.axis_names if mesh.ndim > 1 else mesh.mesh_dim_names,
    )


def _require_order(mesh: Any, axis: int, group: Any) -> None:
    given, wanted = ranks_of(group), list(mesh.ranks_along((axis,)))
    if given is not None and given != wanted:
        raise PlacementError(
            f"torch has no mesh for {mesh!r}: it takes the ranks of a process group in their order "
            f"there, {given}, but along {mesh.layout_mesh.axis_names[axis]!r} they are {wanted}; "
            "make a mesh of ascending ranks"
        )


def _without_groups(mesh: TorchMesh) -> TorchDeviceMesh:
    kind = partial(TorchDeviceMesh, mesh_dim_names=mesh.mesh_dim_names)
    made = torch_mesh_without_groups(kind, mesh.device_type, mesh.mesh, mesh.get_rank())
    if made is None:
        raise PlacementError(
            f"this torch ({torch.__version__}) makes no mesh without a process group: initialise "
            "torch.distributed first"
        )
    return made
