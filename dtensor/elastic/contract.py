"""What a model may not have: all whose results depend on who runs which elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dtckpt.errors import PlacementError

from ..fsdp.unit import Unit
from ..mesh.device_mesh import DeviceMesh
from ..mesh.resolving import AnyMesh, resolve_mesh
from ..torch_private import num_writes


def mesh_of(units: Sequence[Unit], mesh: AnyMesh | None) -> DeviceMesh:
    """Return the mesh of all units; PlacementError where it is another one, or not only of data."""
    given = None if mesh is None and units else resolve_mesh(mesh)
    meshes = [unit.data.mesh for unit in units]
    found = given if given is not None else meshes[0]
    if found.get_coordinate() is None:
        raise PlacementError(
            f"ElasticSteps: this rank is not in the mesh {found.layout_mesh}, whose ranks alone "
            "take the steps"
        )
    for unit in units:
        if not unit.data.mesh.same_ranks_as(found):
            raise PlacementError(
                f"ElasticSteps: a part of the model is sharded over {unit.data.mesh.layout_mesh}, "
                f"another over {found.layout_mesh}; shard all over one mesh"
            )
        for one in unit.held:
            if one.about.model is not None:
                raise PlacementError(
                    f"ElasticSteps: {one.about.name!r} is split over "
                    f"{one.about.model.mesh.layout_mesh} beside the axes of data, and products of "
                    "matrices that are split round otherwise on other meshes: use fully_shard alone"
                )
    return found


def refuse_running_statistics(model: nn.Module) -> None:
    """Raise PlacementError for a batch norm that trains."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, module in model.named_modules():
        if isinstance(module, kinds) and module.training:
            raise PlacementError(
                f"ElasticSteps: {name!r} is a {type(module).__name__} that trains, whose "
                "statistics are those of what a rank runs; use GroupNorm or LayerNorm, or eval() it"
            )


class Buffers:
    """Buffers of a model, which no part may write: each rank would have its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = [*model.buffers()]  # else one that takes the place of another may have its id
        self._before = self._counts()

    def _counts(self) -> dict[str, tuple[int, int]]:
        return {name: (id(one), num_writes(one)) for name, one in self._model.named_buffers()}

    def require_unchanged(self) -> None:
        """Raise PlacementError if one was written."""
        now = self._counts()
        if now == self._before:
            return
        names = [name for name in now if now[name] != self._before.get(name)]
        raise PlacementError(
            f"ElasticSteps: the buffers {', '.join(names[:4])} were written in the forward pass, "
            "on each rank by its own parts of the batch; keep them as they are, or write them "
            "outside of the loop"
        )
