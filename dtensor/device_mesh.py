"""Device meshes: a mesh of ranks with the process groups of a running job.

A ``DeviceMesh`` is a ``Mesh`` value plus three things of this process: a device type, its rank, and
one process group per axis, made when first asked for. Without any process group it still answers
every question that does not depend on the rank, so layouts can be planned anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError
from dtckpt.lazy import lazy_exports

from .collectives import Peers
from .costs import CostModel
from .devices import device_of_rank
from .groups import (
    Axes,
    BackendOverride,
    backend_overrides,
    check_group_ranks,
    given_groups,
    make_group,
    ranks_of,
)
from .halving import HalvingDict
from .job import join_job, rank_here
from .mesh import Mesh
from .mesh_agreement import require_same_mesh
from .modes import enter_mesh, leave_mesh
from .submeshes import SubMeshes
from .transports import Transport, transport_of, usual_transport

T = TypeVar("T")

MAX_QUICK = 4096
"""Kinds of operator calls that a mesh remembers."""

MeshLike = Mesh | torch.Tensor | Sequence[Any]
"""Ranks in an array of any number of axes."""


if TYPE_CHECKING:
    from .mesh_setup import init_device_mesh as init_device_mesh
else:
    # Where torch has it; it is made of what is below.
    __getattr__ = lazy_exports(__name__, {"init_device_mesh": "dtckpt.dtensor.mesh_setup"})


class DeviceMesh(SubMeshes):
    """An n-d array of ranks with a process group per axis.

    ``groups`` gives one group per axis, of the ranks that differ from this one along that axis
    only, in axis order; ``world_group`` one of all ranks in row-major order. What is not given is
    made by ``torch.distributed.new_group`` on first use, which the ranks of that group must reach
    in the same order. ``within`` is a mesh that has the ranks of this one and of others, over whose
    world group tensors go from this mesh to those; without it such a group is made. Where nobody
    has initialised torch.distributed, this does from the environment of a launcher; where there is
    none the mesh answers what needs no rank.

    Two meshes are equal when ranks, shape and device type are. torch's code takes a DeviceMesh for
    one of its own, which ``to_torch`` returns; the two are not equal.

    In a job every rank has to make the mesh, those outside of it, too, unless ``groups`` or
    ``rank`` is given: the ranks compare what they pass, and PlacementError is raised on all of them
    where it differs. To plan with, a ``Mesh`` is enough.

    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> mesh.shape, mesh.size("tp"), mesh.get_rank() if mesh.has_rank else None
    ((2, 2), 2, None)
    """

    def __init__(
        self,
        device_type: str,
        mesh: MeshLike,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        rank: int | None = None,
        groups: Sequence[Any] | None = None,
        world_group: Any = None,
        within: DeviceMesh | None = None,
        backend_override: Mapping[int | str, BackendOverride] | None = None,
    ) -> None:
        super().__init__()
        is_of_job = rank is None and groups is None and world_group is None
        if is_of_job:
            join_job()
            is_of_job = dist.is_initialized()
        if is_of_job:
            require_same_mesh(device_type, f"{device_type!r} {_told(mesh, mesh_dim_names)}")
        if ":" in device_type:
            raise PlacementError(
                f"a mesh needs a device type such as 'cuda', not the single device {device_type!r}"
            )
        self._device_type = device_type
        self.layout_mesh = _as_mesh(mesh, mesh_dim_names)
        """The pure value: shape, axis names and ranks."""
        self._groups = given_groups(self.layout_mesh, groups, world_group)
        self._backends = backend_overrides(self.layout_mesh, backend_override)
        self.within = within
        self._own_rank = self._find_rank(rank)
        self._coordinate = (
            None if self._own_rank is None else self.layout_mesh.coordinate(self._own_rank)
        )
        self._peers: dict[tuple[int, ...], Peers] = {}
        self._rows: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._device: torch.device | None = None
        self._lock = threading.RLock()
        self._caches: dict[str, Any] = {}
        self.costs: CostModel | None = None
        """What communication costs here; None for what is known of the backend. Set it alike on
        all ranks, before anything is redistributed."""
        self.quick_calls: HalvingDict[tuple[Any, ...], Any] = HalvingDict(MAX_QUICK)
        """Operator calls of known kinds, where every call looks first (``quick``)."""
        if self._coordinate is not None and (is_of_job or self._groups):
            _ = self.device  # selected in the thread that makes the mesh, before any group

    def _find_rank(self, rank: int | None) -> int | None:
        if rank is not None:
            return rank
        if all((axis,) in self._groups for axis in range(self.ndim)):
            here = tuple(self._groups[(axis,)].rank() for axis in range(self.ndim))
            return self.layout_mesh.rank(here)
        return dist.get_rank() if dist.is_initialized() else None

    @staticmethod
    def from_torch(mesh: TorchDeviceMesh) -> DeviceMesh:
        """Return a mesh around one of torch, with its process groups; always the same one."""
        from .mesh_setup import device_mesh_from_torch

        return device_mesh_from_torch(mesh)

    @staticmethod
    def from_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        group: Any,
        device_type: str,
        mesh: MeshLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        world_group: Any = None,
    ) -> DeviceMesh:
        """Return a mesh of existing groups: one group, or a list of them, one per axis.

        A single group needs no ``mesh``: its ranks are used. A list needs ``mesh``. Groups that
        know their global ranks are checked against the mesh.
        """
        several = isinstance(group, list | tuple)
        groups: list[Any] = list(group) if several else [group]
        if mesh is None:
            if len(groups) != 1:
                raise PlacementError(f"{len(groups)} groups need a mesh that says how they lie")
            mesh = ranks_of(groups[0]) or list(range(groups[0].size()))
        made = DeviceMesh(
            device_type, mesh, mesh_dim_names=mesh_dim_names, groups=groups, world_group=world_group
        )
        for axis, single in enumerate(groups):
            name = made.layout_mesh.axis_names[axis]
            check_group_ranks(single, made.ranks_along((axis,)), name)
        return made

    @property
    def device_type(self) -> str:
        """Type of the devices of all ranks, such as "cuda"."""
        return self._device_type

    @property
    def device(self) -> torch.device:
        """This rank's device, with its index, which does not depend on the thread that asks.

        It is selected for the process where nobody has selected one (``devices``).
        """
        if self._device is None:
            above = None if self._parent is None else self._parent[0]
            self._device = device_of_rank(self.device_type) if above is None else above.device
        return self._device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.layout_mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of coordinates along every axis."""
        return self.layout_mesh.shape

    @property
    def mesh(self) -> torch.Tensor:
        """Array of the global ranks, on the CPU."""
        ranks = torch.tensor(self.layout_mesh.all_ranks(), dtype=torch.int, device="cpu")
        return ranks.view(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """One name per axis; None where none were given, though ``axis0``, ... name them, too."""
        return self.layout_mesh.axis_names if self.layout_mesh.is_named else None

    @property
    def has_rank(self) -> bool:
        """Whether this process has a rank."""
        return self._own_rank is not None

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks, or of coordinates along one axis."""
        if mesh_dim is None:
            return self.layout_mesh.size
        return self.shape[self.layout_mesh.axis(mesh_dim)]

    def get_rank(self) -> int:
        """Return the global rank of this process; PlacementError where it has none."""
        if self._own_rank is None:
            raise PlacementError(
                f"this process has no rank in mesh {self.layout_mesh}: initialise "
                "torch.distributed, or pass groups= or rank= to the DeviceMesh"
            )
        return self._own_rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate, or None where the mesh does not include it."""
        self.get_rank()
        return self._coordinate

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return any rank's coordinate."""
        return self.layout_mesh.coordinate(rank)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's index along an axis, which 1-d meshes need not name."""
        return self._here()[self._single_axis(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the process group along an axis, which 1-d meshes need not name."""
        return self.group_of((self._single_axis(mesh_dim),))

    def get_all_groups(self) -> list[Any]:
        """Return the process groups, one per axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def group_of(self, axes: tuple[int, ...]) -> Any:
        """Return the group of the ranks that differ from this one along ``axes`` only.

        ``axes`` must ascend.
        """
        above = self._above(axes)
        if above is not None:
            return above[0].group_of(above[1])
        group = self._groups.get(axes)
        if group is None:
            with self._lock:
                group = self._groups.get(axes)
                if group is None:
                    backend = self._backends.get(axes)
                    group = make_group(self.layout_mesh, axes, self.ranks_along, backend)
                    self._groups[axes] = group
        return group

    def peers(self, axes: tuple[int, ...]) -> Peers:
        """Return that group's ranks in row-major order of their coordinates along ``axes``."""
        found = self._peers.get(axes)
        if found is None:
            group = self.group_of(axes)
            ranks = self.ranks_along(axes)
            positions = self._group_ranks(group, axes)
            found = self._peers[axes] = Peers(group, positions, ranks, self.device_type)
        return found

    @property
    def transport(self) -> Transport:
        """What moves bytes here: that of the groups there are, else of those that would be made."""
        if self._groups:
            return transport_of(next(iter(self._groups.values())), self.device_type)
        if self._parent is not None:
            return self._parent[0].transport
        if dist.is_initialized():
            return transport_of(dist.group.WORLD, self.device_type)
        return usual_transport(self.device_type)

    def cost_model(self) -> CostModel:
        """Return what communication costs here: ``costs`` where they are set."""
        return self.costs or self.transport.costs

    def _group_ranks(self, group: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
        ranks = self.ranks_along(axes)
        registered = ranks_of(group)
        if registered is not None:
            return tuple(registered.index(rank) for rank in ranks)
        above = self._above(axes)
        if above is None:
            return tuple(range(len(ranks)))
        order = above[0].ranks_along(above[1])
        group_ranks = above[0].peers(above[1]).group_ranks
        return tuple(group_ranks[order.index(rank)] for rank in ranks)

    def can_group(self, axes: tuple[int, ...]) -> bool:
        """Whether there is a group along ``axes``, which ascend, or can be made."""
        above = self._above(axes)
        if above is not None:
            return above[0].can_group(above[1])
        return axes in self._groups or dist.is_initialized()

    def ranks_along(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that differ from this one along ``axes`` only, in row-major order."""
        found = self._rows.get(axes)
        if found is None:
            found = self.layout_mesh.submesh(axes, self._here()).all_ranks()
            self._rows[axes] = found
        return found

    def _here(self) -> tuple[int, ...]:
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise PlacementError(f"rank {self._own_rank} is not in mesh {self.layout_mesh}")
        return coordinate

    def _single_axis(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is not None:
            return self.layout_mesh.axis(mesh_dim)
        if self.ndim > 1:
            raise PlacementError(
                f"mesh {self.layout_mesh} has {self.ndim} axes: name one of "
                f"{self.layout_mesh.axis_names}"
            )
        return 0

    @property
    def is_silent(self) -> bool:
        """Whether the mesh has no process groups and nobody to make them."""
        if self._parent is not None and not self._groups:
            return self._parent[0].is_silent
        return not self._groups and not dist.is_initialized()

    def _like(self, mesh: Mesh) -> Self:
        return type(self)(self._device_type, mesh, rank=self._own_rank)

    def _override(self, axes: Axes, backend: BackendOverride) -> None:
        with self._lock:
            if axes in self._groups:
                names = tuple(self.layout_mesh.axis_names[axis] for axis in axes)
                raise PlacementError(
                    f"backend_override comes too late: mesh {self.layout_mesh} has a process group "
                    f"over {names} already"
                )
            self._backends[axes] = backend

    def cache(self, name: str, make: Callable[[], T]) -> T:
        """Return this mesh's cache of that name; what ranks keep lives with their mesh."""
        found = self._caches.get(name)
        if found is None:
            with self._lock:
                found = self._caches.setdefault(name, make())
        return found

    def forget(self, name: str) -> None:
        """Let go of a cache."""
        with self._lock:
            self._caches.pop(name, None)

    def cache_sizes(self) -> dict[str, int]:
        """Return the number of entries of every cache that has any, by name."""
        with self._lock:
            caches = {**self._caches, "quick_calls": self.quick_calls}
        sizes = {name: len(cache) for name, cache in caches.items() if isinstance(cache, Sized)}
        return {name: size for name, size in sorted(sizes.items()) if size}

    def __enter__(self) -> Self:
        super().__enter__()  # for torch's code
        enter_mesh(self)
        return self

    def __exit__(self, exc_type: object, exc_value: object, exc_traceback: object) -> None:
        leave_mesh()
        super().__exit__(exc_type, exc_value, exc_traceback)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeviceMesh):
            return self is other or (
                self.layout_mesh == other.layout_mesh and self.device_type == other.device_type
            )
        if isinstance(other, TorchDeviceMesh):
            return False  # names count for torch's, and not for ours
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.layout_mesh, self.device_type))

    def __copy__(self) -> Self:
        return self  # a mesh is this process's place in a job: there is no second one

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        """Pickled are ranks, names and device type; the process that loads it has its own place."""
        if self._parent is not None:
            return _taken_again, (self._parent[0], *self._recipe)
        return _unpickled, (self._device_type, self.layout_mesh)

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {str(self.layout_mesh)!r})"


def _told(mesh: MeshLike, names: Sequence[str] | None) -> str:
    """Return the same text for the same ranks and names, however they are given."""
    if isinstance(mesh, Mesh):
        ranks, names = torch.tensor(mesh.all_ranks()).view(mesh.shape), names or mesh.axis_names
        return f"{ranks.tolist()} {list(names)}"
    try:
        told = str(torch.as_tensor(mesh).tolist())
    except (TypeError, ValueError, RuntimeError):  # what is wrong with it is said on every rank
        told = repr(mesh)
    return f"{told} {None if names is None else list(names)}"


def _unpickled(device_type: str, mesh: Mesh) -> DeviceMesh:
    return DeviceMesh(device_type, mesh, rank=rank_here())


def _taken_again(parent: DeviceMesh, method: str, arguments: tuple[Any, ...]) -> DeviceMesh:
    return getattr(parent, method)(*arguments)


def _as_mesh(mesh: MeshLike, names: Sequence[str] | None) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh if names is None else Mesh(mesh.shape, tuple(names), mesh.ranks)
    ranks = torch.as_tensor(mesh)
    return Mesh(tuple(ranks.shape), tuple(names or ()), tuple(ranks.flatten().tolist()))
