"""The axes of a mesh over which parameters are sharded, or repeated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtckpt.errors import PlacementError

from ..geometry.placement import Placement, Replicate
from ..mesh.device_mesh import DeviceMesh

Names = str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """Which axes of a mesh with others, such as those of the model, ranks have data of their own.

    Several of a kind count as one axis, the last one fastest.
    """

    shard: Names = None
    """Over which parameters are sharded."""
    replicate: Names = None
    """Over which they are repeated."""

    def __post_init__(self) -> None:
        if not _listed(self.shard) and not _listed(self.replicate):
            raise PlacementError("DataParallelMeshDims needs axes in shard, replicate or both")


@dataclass(frozen=True, slots=True)
class DataAxes:
    """A mesh of those axes alone: first those that repeat parameters, then those that shard."""

    mesh: DeviceMesh
    num_replicate: int

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataAxes:
        """Return the axes of a mesh; PlacementError where it is not clear which they are."""
        if dims is not None:
            if not hasattr(dims, "shard") or not hasattr(dims, "replicate"):
                raise PlacementError(
                    f"fully_shard: dp_mesh_dims must be a DataParallelMeshDims, got {dims!r}"
                )
            names = (*_listed(dims.replicate), *_listed(dims.shard))
            return cls(mesh[names], len(_listed(dims.replicate)))
        if mesh.ndim not in (1, 2):
            raise PlacementError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: parameters are sharded "
                "over the last dim and repeated over the other one (HSDP). Pass a part of the "
                "mesh, as mesh['dp'], or dp_mesh_dims=DataParallelMeshDims(shard='dp')"
            )
        return cls(mesh, mesh.ndim - 1)

    @property
    def num_shard(self) -> int:
        """Number of axes that shard."""
        return self.mesh.ndim - self.num_replicate

    @property
    def num_shards(self) -> int:
        """In how many parts parameters are cut."""
        return math.prod(self.mesh.shape[self.num_replicate :])

    def placements(
        self, shard: Placement, repeated: Placement | None = None
    ) -> tuple[Placement, ...]:
        """Return how a parameter lies that is sharded so."""
        first = Replicate() if repeated is None else repeated
        return (first,) * self.num_replicate + (shard,) * self.num_shard

    def smaller(self, size: int) -> DeviceMesh:
        """Return the mesh of as many ranks that follow each other, with their own group.

        PlacementError unless that divides the ranks that share a parameter.
        """
        ranks = self.num_shards
        if size < 1 or ranks % size:
            fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise PlacementError(
                f"fully_shard: reshard_after_forward={size} must divide the {ranks} ranks that "
                f"share a parameter: one of {fitting}, True or False"
            )
        names = self.mesh.layout_mesh.axis_names
        taken: tuple[str, ...] = ()
        mesh, left = self.mesh, size
        for axis in range(self.mesh.ndim - 1, self.num_replicate - 1, -1):
            name, count = names[axis], self.mesh.shape[axis]
            if left == 1:
                break
            if left % count:
                if count % left:
                    raise PlacementError(
                        f"fully_shard: reshard_after_forward={size} cuts axis {name!r} of {count} "
                        f"ranks in parts that are not equal: {self.mesh}"
                    )
                parts = (f"{name}_outer", f"{name}_inner")
                mesh = mesh.unflatten(axis, (count // left, left), parts)
                name, count = parts[1], left
            taken, left = (name, *taken), left // count
        found = mesh[taken]
        found.peers(tuple(range(found.ndim)))  # a new group is made now, by all ranks alike
        return found


def _listed(names: Names) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
