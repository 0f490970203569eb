"""Meshes in pickles of torch: which ranks there are, as each rank has it noted.

Up to torch 2.9 a DeviceMesh is a tensor of ranks; later ones are a table of the ranks of the mesh
that they were cut out of, with sizes and strides of their axes (torch/distributed/device_mesh.py
and _mesh_layout.py).
"""

from __future__ import annotations

import math
import operator
from itertools import product
from typing import Any

from ....dtensor.comm.caches import remembered
from ....dtensor.geometry.mesh import Mesh
from ...state.limits import shown
from .objects import Object, list_of_ints


class MeshObject(Object):
    """A DeviceMesh."""


def mesh_of(told: Any) -> Mesh:
    """Return the mesh of a DeviceMesh: a tensor of ranks once, a table of them with strides now."""
    if not isinstance(told, MeshObject):
        raise TypeError(f"{shown(told)} is no mesh")
    state = vars(told)
    names = tuple(state.get("_mesh_dim_names", state.get("mesh_dim_names")) or ())
    if "_layout" not in state:  # up to torch 2.9
        return Mesh(state["mesh"].shape, names, list_of_ints(state["_flatten_mesh_list"]))
    ranks = list_of_ints(state["_flatten_rank_map"])
    own = state.get("_coordinate_on_dim")
    at = None if own is None else ranks.index(state["_rank"]), list_of_ints(own or ())
    return _mesh_of_table(names, _axes(state["_layout"]), ranks, *at)


Axis = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of the axes of a table that are one axis of a mesh."""


@remembered(256)
def _mesh_of_table(
    names: tuple[str, ...],
    axes: tuple[Axis, ...],
    ranks: tuple[int, ...],
    index: int | None,
    own: tuple[int, ...],
) -> Mesh:
    """Return the mesh with the rank at an index, of all that a table of ranks was cut into."""
    if math.prod(math.prod(sizes) for sizes, _ in axes) > len(ranks):
        raise ValueError(f"a mesh of axes {shown(axes)} in a table of {len(ranks)} ranks")
    offsets = [
        [sum(map(operator.mul, at, strides)) for at in product(*map(range, sizes))]
        for sizes, strides in axes
    ]
    first = 0
    if index is not None:
        first = index - sum(offset[i] for offset, i in zip(offsets, own, strict=True))
    if first < 0:
        raise ValueError("a rank does not lie in its own mesh")
    found = tuple(ranks[first + sum(at)] for at in product(*offsets))
    return Mesh(tuple(map(len, offsets)), names, found)


def _axes(layout: Any) -> tuple[Axis, ...]:
    axes = getattr(layout, "axes", None)
    if axes is None:  # up to torch 2.12
        pairs = list(zip(_several(layout.shape), _several(layout.stride), strict=True))
    else:
        pairs = [(axis.shape, axis.stride) for axis in axes]
    return tuple((list_of_ints(_several(n)), list_of_ints(_several(s))) for n, s in pairs)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
