"""Device meshes: a mesh of ranks with the process groups of a running job.

A ``DeviceMesh`` is a ``Mesh`` value plus three things of this process: a device type, its rank, and
one process group per axis, made when first asked for. Without any process group it still answers
every question that does not depend on the rank, so layouts can be planned anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError

from ..comm.caches import Cache
from ..comm.devices import device_of_rank
from ..comm.groups import (
    BackendOverride,
    BackendOverrides,
    backend_overrides,
    check_group_ranks,
    given_groups,
    ranks_of,
)
from ..geometry.integers import ints
from ..geometry.mesh import Mesh
from ..torch_private import abort_groups, rank_of_torch_mesh
from .default_group import join_job, join_or_be_alone, rank_here
from .modes import enter_mesh, leave_mesh
from .same_mesh import require_same_mesh
from .submeshes import RECIPES, SubMeshes
from .torch_mesh import mesh_from_torch, our_mesh_of

T = TypeVar("T")

MAX_QUICK = 4096
"""Kinds of operator calls that a mesh remembers."""

MeshLike = Mesh | torch.Tensor | Sequence[Any]
"""Ranks in an array of any number of axes."""


_ALIVE: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()


class DeviceMesh(SubMeshes):
    """An n-d array of ranks with a process group per axis.

    ``groups`` gives one group per axis, of the ranks that differ from this one along that axis
    only, in axis order; ``world_group`` one of all ranks in row-major order. What is not given is
    made by ``torch.distributed.new_group`` on first use, which the ranks of that group must reach
    in the same order. Such groups have their ranks in ascending order, or with
    ``preserve_rank_order`` in that of the mesh. ``backend_override`` is as in ``init_device_mesh``,
    or has a backend and its options for each dim. ``within`` is a mesh of exactly the ranks of
    this one and of another, over whose world group tensors go between the two; without it such a
    group is made. Where nobody has initialised torch.distributed, this does from the environment
    of a launcher; where there is none the mesh answers what needs no rank.

    Two meshes are equal when ranks, shape, names and device type are; tensors on meshes that differ
    in names only go together. torch's code takes a DeviceMesh for one of its own, which
    ``to_torch`` returns; the two are not equal.

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
        backend_override: BackendOverrides | None = None,
        preserve_rank_order: bool = False,
    ) -> None:
        is_of_job = rank is None and groups is None and world_group is None
        if is_of_job:
            join_job()
            is_of_job = dist.is_initialized()
        if is_of_job:
            told = _told(mesh, mesh_dim_names) + (" in this order" if preserve_rank_order else "")
            require_same_mesh(device_type, f"{device_type!r} {told}")
        _require_type(device_type)
        value = _as_mesh(mesh, mesh_dim_names)
        found = given_groups(value, groups, world_group)
        super().__init__(
            device_type,
            value,
            found,
            backend_overrides(value, backend_override),
            rank,
            preserve_rank_order,
        )
        self._like = partial(
            type(self),
            device_type,
            rank=self._own_rank,
            preserve_rank_order=preserve_rank_order,
        )
        self.within = within
        self._device: torch.device | None = None
        _ALIVE[id(self)] = self
        self._states: dict[str, Any] = {}
        self._caches: dict[str, Cache[Any, Any]] = {}
        self.quick_calls = self.cache("quick_calls", MAX_QUICK)
        """Operator calls of known kinds, where every call looks first (``quick``)."""
        if self._coordinate is not None and (is_of_job or self._groups):
            _ = self.device  # selected in the thread that makes the mesh, before any group

    @staticmethod
    def from_torch(mesh: TorchDeviceMesh) -> DeviceMesh:
        """Return a mesh around one of torch, with its process groups; always the same one.

        A mesh of ours is returned as it is.
        """
        if isinstance(mesh, DeviceMesh):
            return mesh

        def make() -> DeviceMesh:
            return DeviceMesh(
                mesh.device_type,
                mesh_from_torch(mesh),
                rank=dist.get_rank() if dist.is_initialized() else rank_of_torch_mesh(mesh),
                groups=_groups_of(mesh),
            )

        return our_mesh_of(mesh, make)

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
        value = _as_mesh(mesh, None)
        if value.ndim != len(groups):
            told = torch.tensor(value.all_ranks()).view(value.shape).tolist()
            raise PlacementError(
                "Expects mesh with ndim equal to number of ProcessGroups but got mesh "
                f"{told} and {len(groups)} ProcessGroups"
                if several
                else f"Invalid mesh {told} for ProcessGroup with ranks {ranks_of(group)}: a mesh "
                f"of {value.ndim} dims needs a list of as many groups"
            )
        made = DeviceMesh(
            device_type,
            mesh,
            mesh_dim_names=mesh_dim_names,
            groups=groups,
            world_group=world_group,
        )
        for axis, single in enumerate(groups):
            name = made.layout_mesh.axis_names[axis]
            check_group_ranks(single, made.ranks_along((axis,)), name)
        return made

    @staticmethod
    def with_id(number: int) -> DeviceMesh:
        """Return the mesh of this ``id``, which graphs of compilers have in its place."""
        return _ALIVE[number]

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
    def mesh(self) -> torch.Tensor:
        """Array of the global ranks, on the CPU."""
        ranks = torch.tensor(self.layout_mesh.all_ranks(), dtype=torch.int, device="cpu")
        return ranks.view(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """One name per axis; None where none were given, though ``axis0``, ... name them, too."""
        return self.layout_mesh.axis_names if self.layout_mesh.is_named else None

    def abort(self) -> None:
        """Abort the process groups of this mesh and of all that were taken from it.

        For ranks that would wait for one that is lost: on NCCL what waits raises, on Gloo it does
        at the timeout of the group. Afterwards PlacementError is raised by what would send. The
        job's default group is among them if the mesh goes over all its ranks.

        PlacementError for a mesh that was taken from another one.
        """
        if self._parent is not None:
            raise PlacementError(
                f"abort() of mesh {self.layout_mesh}, which was taken from mesh "
                f"{self._parent[0].layout_mesh} and shares its process groups: abort the root mesh"
            )
        with self._lock:
            self._forget_groups()
            abort_groups(list({id(group): group for group in self._groups.values()}.values()))

    def _forget_groups(self) -> None:
        self._is_aborted = True
        self._peers.clear()
        for cache in self.caches():  # what they hold knows the groups
            cache.clear()
        for child in self._children.values():
            child._forget_groups()

    def state(self, name: str, make: Callable[[], T]) -> T:
        """Return what is kept of this mesh under a name; it lives as long as the mesh."""
        found = self._states.get(name)
        if found is None:
            with self._lock:
                found = self._states.setdefault(name, make())
        return found

    def cache(self, name: str, limit: int) -> Cache[Any, Any]:
        """Return this mesh's cache of that name, made when first asked for."""
        found = self._caches.get(name)
        if found is None:
            with self._lock:
                found = self._caches.setdefault(name, Cache(name, limit))
        return found

    def caches(self) -> list[Cache[Any, Any]]:
        """Return the caches that were asked for."""
        with self._lock:
            return list(self._caches.values())

    def __enter__(self) -> Self:
        super().__enter__()  # for torch's code
        enter_mesh(self)
        return self

    def __exit__(self, exc_type: object, exc_value: object, exc_traceback: object) -> None:
        leave_mesh()
        super().__exit__(exc_type, exc_value, exc_traceback)

    def same_ranks_as(self, other: DeviceMesh) -> bool:
        """Return whether another mesh differs from this one in names only."""
        return self is other or (
            self.layout_mesh == other.layout_mesh and self._device_type == other._device_type
        )

    def __eq__(self, other: object) -> bool:
        # Names count: torch keeps the meshes of its results by equality, and FSDP goes by names.
        if isinstance(other, DeviceMesh):
            return self is other or (
                self.same_ranks_as(other)
                and self.layout_mesh.axis_names == other.layout_mesh.axis_names
                and self._preserve_rank_order == other._preserve_rank_order
            )
        return False if isinstance(other, TorchDeviceMesh) else NotImplemented

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
        mesh = self.layout_mesh
        order = (True,) if self._preserve_rank_order else ()
        return _unpickled, (self._device_type, mesh.shape, mesh.axis_names, mesh.ranks, *order)

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {str(self.layout_mesh)!r})"


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
        _require_type(device_type)
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


def _require_type(device_type: str) -> None:
    if ":" in device_type:
        raise PlacementError(
            "Device type with index is not supported: a mesh needs one such as 'cuda', got "
            f"{device_type!r}"
        )


def _backend_name(backend: BackendOverride) -> str:
    """Return what is the same on all ranks: options have no text of their own."""
    given: Any = backend[0] if isinstance(backend, tuple) else backend
    return given if isinstance(given, str) else type(given).__name__


def _groups_of(torch_mesh: TorchDeviceMesh) -> list[Any] | None:
    if not dist.is_initialized() or torch_mesh.get_coordinate() is None:
        return None
    try:
        return torch_mesh.get_all_groups()
    except RuntimeError:  # made without a backend: groups are then made when they are needed
        return None


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


def _unpickled(
    device_type: str,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    ranks: tuple[int, ...] | None,
    keeps_order: bool = False,
) -> DeviceMesh:
    mesh = Mesh(shape, names, ranks)
    return DeviceMesh(device_type, mesh, rank=rank_here(), preserve_rank_order=keeps_order)


def _taken_again(parent: DeviceMesh, method: str, arguments: tuple[Any, ...]) -> DeviceMesh:
    if method not in RECIPES:
        raise PlacementError(f"not a way to take a mesh from a mesh: {method!r}")
    return getattr(parent, method)(*arguments)


# They make a mesh of numbers and names, and no process group: a file may call them.
torch.serialization.add_safe_globals([_unpickled, _taken_again])


def _as_mesh(mesh: MeshLike, names: Sequence[str] | None) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh if names is None else Mesh(mesh.shape, tuple(names), mesh.ranks)
    ranks = torch.as_tensor(mesh)
    return Mesh(tuple(ranks.shape), tuple(names or ()), tuple(ranks.flatten().tolist()))
