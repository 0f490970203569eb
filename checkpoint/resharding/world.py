"""The layouts of a checkpoint for another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ..files.stored_tensor import StoredTensor
from .placing import Placed, all_placed, is_of_rank

DATA_AXES = ("dp_shard", "fsdp", "dp", "data")
"""Names of the axis that is made longer or shorter; the first one that a mesh has."""
_GIVE_BOTH = "Give the mesh and the placements that are meant"


def place_for_world(tensors: Iterable[StoredTensor], num_ranks: int) -> list[Placed]:
    """Return every tensor with the same placements for another number of ranks.

    The data axis of its mesh is made as long as it takes: the only axis of the mesh, or the one
    called as in ``DATA_AXES``. What a rank kept for itself stays with its rank. LayoutMismatch
    where meshes differ in size or are of some ranks only, where that axis cannot be told or
    ``num_ranks`` is no multiple of the others, and for layouts that list sizes or boxes of ranks.
    """
    meshes: dict[tuple[Mesh, tuple[str, ...]], Mesh] = {}  # axis names do not tell meshes apart
    sizes: set[int] = set()

    def placed(tensor: StoredTensor) -> Placed:
        layout = tensor.layout
        if is_of_rank(tensor):
            return Placed(tensor=tensor, layout=layout, note="stays with its rank")
        if not isinstance(layout, Layout):
            raise LayoutMismatch(f"its layout lists the boxes of ranks. {_GIVE_BOTH}")
        key = layout.mesh, layout.mesh.axis_names
        if key not in meshes:
            meshes[key] = _scaled(layout.mesh, num_ranks)
            sizes.add(layout.mesh.size)
        if len(sizes) > 1:
            raise LayoutMismatch(
                f"it lies on {layout.mesh.size} ranks, and others on "
                f"{', '.join(map(str, sorted(sizes - {layout.mesh.size})))}. {_GIVE_BOTH}"
            )
        return Placed(
            tensor=tensor,
            layout=Layout(meshes[key], layout.placements, layout.shape),
            note="as before",
        )

    return all_placed(tensors, placed, f"the layouts cannot be those of {num_ranks} ranks")


def _scaled(mesh: Mesh, num_ranks: int) -> Mesh:
    """Return a mesh of another number of ranks."""
    if mesh.ranks is not None:
        raise LayoutMismatch(f"it lies on some ranks only, {mesh}. {_GIVE_BOTH}")
    known = [name for name in DATA_AXES if name in mesh.axis_names]
    if mesh.ndim > 1 and not known:
        raise LayoutMismatch(
            f"no axis of its mesh {mesh} is called {' or '.join(DATA_AXES)}. {_GIVE_BOTH}"
        )
    axis = mesh.axis(known[0]) if mesh.ndim > 1 else 0
    others = math.prod(mesh.shape) // mesh.shape[axis]
    if num_ranks < 1 or num_ranks % others:
        raise LayoutMismatch(
            f"{num_ranks} ranks are no multiple of the {others} of the other axes of its mesh "
            f"{mesh}. {_GIVE_BOTH}"
        )
    shape = (*mesh.shape[:axis], num_ranks // others, *mesh.shape[axis + 1 :])
    return Mesh(shape, mesh.axis_names)
