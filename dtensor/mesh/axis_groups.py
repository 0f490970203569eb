"""The process groups of a mesh, and the place of this process in it."""

from __future__ import annotations

import threading
from typing import Any, Self

import torch.distributed as dist

from dtckpt.errors import PlacementError

from ..comm.collectives import Peers
from ..comm.costs import CostModel
from ..comm.groups import Axes, BackendOverride, make_group, ranks_of
from ..comm.transports import Transport, transport_of, usual_transport
from ..geometry.mesh import Mesh
from .torch_mesh import TorchMesh

Parts = tuple[Axes, ...]
"""For every axis of a mesh the axes of another one that it goes along."""


class MeshGroups(TorchMesh):
    """Who talks to whom along which axes; a base of ``DeviceMesh``.

    A mesh that was taken from another one has the groups of that.
    """

    costs: CostModel | None
    """What communication costs here; None for what is known of the backend. Set it alike on
    all ranks, before anything is redistributed."""

    def __init__(
        self,
        device_type: str,
        mesh: Mesh,
        groups: dict[Axes, Any],
        backends: dict[Axes, BackendOverride],
        rank: int | None,
        keeps_order: bool,
    ) -> None:
        self._device_type = device_type
        self.layout_mesh = mesh
        self._groups = groups
        self._backends = backends
        self._preserve_rank_order = keeps_order
        """Whether groups have their ranks in the order of the mesh. torch's code reads the name."""
        self._parent: tuple[Self, Parts] | None = None
        self._own_rank = self._find_rank(rank)
        self._coordinate = None if self._own_rank is None else mesh.coordinate(self._own_rank)
        self._peers: dict[tuple[int, ...], Peers] = {}
        self._is_aborted = False
        self._rows: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lock = threading.RLock()
        self.costs = None

    def _find_rank(self, rank: int | None) -> int | None:
        if rank is not None:
            return rank
        if all((axis,) in self._groups for axis in range(self.ndim)):
            here = tuple(self._groups[(axis,)].rank() for axis in range(self.ndim))
            return self.layout_mesh.rank(here)
        return dist.get_rank() if dist.is_initialized() else None

    @property
    def device_type(self) -> str:
        """Type of the devices of all ranks, such as "cuda"."""
        return self._device_type

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.layout_mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of coordinates along every axis."""
        return self.layout_mesh.shape

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
        if self._is_aborted:
            raise PlacementError(
                f"the process groups of mesh {self.layout_mesh} were aborted; make another mesh"
            )
        group = self._groups.get(axes)
        if group is None:
            with self._lock:
                group = self._groups.get(axes)
                if group is None:
                    backend = self._backends.get(axes)
                    group = make_group(
                        self.layout_mesh,
                        axes,
                        self.ranks_along,
                        backend,
                        keeps_order=self._preserve_rank_order,
                    )
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

    @property
    def is_silent(self) -> bool:
        """Whether the mesh has no process groups and nobody to make them."""
        if self._parent is not None and not self._groups:
            return self._parent[0].is_silent
        return not self._groups and not dist.is_initialized()

    def _above(self, axes: Axes) -> tuple[Self, Axes] | None:
        """Return the parent, and the axes along which it has the same groups; None for none."""
        if self._parent is None or axes in self._backends:
            return None
        parent, parts = self._parent
        above = {a for axis in axes for a in parts[axis]}
        if any(axis not in axes and above.intersection(part) for axis, part in enumerate(parts)):
            return None  # a part of what was one axis
        return parent, tuple(sorted(above))

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
                "Optional kwarg `mesh_dim` needs to be specified when device_mesh.ndim > 1: mesh "
                f"{self.layout_mesh} has the dims {self.layout_mesh.axis_names}"
            )
        return 0

    def _override(self, axes: Axes, backend: BackendOverride) -> None:
        with self._lock:
            if axes in self._groups:
                names = tuple(self.layout_mesh.axis_names[axis] for axis in axes)
                raise PlacementError(
                    f"backend_override comes too late: mesh {self.layout_mesh} has a process group "
                    f"over {names} already"
                )
            self._backends[axes] = backend
