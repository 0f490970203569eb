"""Layouts by the names of mesh axes, as torchtitan's ``SpmdLayout`` states them, as placements.

``axis_types`` maps the name of an axis to one of the types of spmd_types: ``R`` and ``I`` have the
whole along it, ``S(dim)`` a part, ``P`` a term of a sum, and of ``V`` only a ``partition_spec``
tells what it is: for each dim the axes that cut it, the first one first. The classes are known by
these attributes alone. Facts are those of torchtitan 0.3.0 and spmd_types 0.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtckpt.errors import PlacementError

from ..geometry.mesh import Mesh
from ..geometry.placement import Partial, Placement, Replicate, Shard

_LOGICAL = {"dp": ("dp_replicate", "dp_shard")}
"""Names that torchtitan has for several axes together."""


def is_spmd_layout(value: object) -> bool:
    """Whether a value states placements by the names of axes."""
    return isinstance(getattr(value, "axis_types", None), Mapping)


def placements_from_spmd(layout: Any, mesh: Mesh, tensor_ndim: int) -> tuple[Placement, ...]:
    """Return the placement along every axis of ``mesh``.

    Raises PlacementError where the layout and the mesh have other axes, unless these are of one
    coordinate and do not cut, and where nothing tells what an axis cuts.

    >>> from types import SimpleNamespace as Given
    >>> layout = Given(axis_types={"dp": Given(value="R")}, partition_spec=(None, ("tp", "cp")))
    >>> placements_from_spmd(layout, Mesh((2, 2, 2), ("dp", "cp", "tp")), 2)
    (Replicate(), Shard(dim=1, order=1), Shard(dim=1, order=0))
    """
    by_axis: dict[str, Placement | None] = {}
    for axis, kind in layout.axis_types.items():
        for name in _axes(axis, mesh):
            by_axis[name] = _placement(kind)
    single = {name for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size == 1}
    spec: Sequence[Any] = layout.partition_spec or ()
    for dim, entry in enumerate(spec):
        cuts: Sequence[Any] = () if entry is None else entry if type(entry) is tuple else (entry,)
        names = [name for cut in cuts for name in _axes(cut, mesh) if name not in single]
        by_axis |= {name: Shard(dim, order) for order, name in enumerate(names)}
    unknown = by_axis.keys() - set(mesh.axis_names)
    if any(not isinstance(by_axis[name], Replicate) for name in unknown):
        raise PlacementError(
            f"{layout} says what axes {sorted(unknown)} hold, which mesh {mesh} has not; give the "
            "mesh with all its axes, those of one rank included"
        )
    return tuple(
        Replicate() if name in single else _checked(layout, by_axis, name, tensor_ndim)
        for name in mesh.axis_names
    )


def _checked(
    layout: Any, by_axis: Mapping[str, Placement | None], name: str, ndim: int
) -> Placement:
    placement = by_axis.get(name)
    if placement is None:
        told = "that it varies, and not along which dim" if name in by_axis else "nothing"
        raise PlacementError(
            f"{layout} says of axis {name!r} {told}; state what it cuts, by S(dim) or a "
            "partition_spec"
        )
    if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
        raise PlacementError(f"{layout} cuts dim {placement.dim} of a tensor of {ndim} dims")
    return placement


def _axes(axis: Any, mesh: Mesh) -> tuple[str, ...]:
    name = getattr(axis, "value", axis)
    if not isinstance(name, str):
        raise PlacementError(f"{axis!r} is no name of an axis; layouts name axes of a mesh")
    return (name,) if name in mesh.axis_names else _LOGICAL.get(name, (name,))


def _placement(kind: Any) -> Placement | None:
    """Return what a type says; None for one that says only that ranks have different elements."""
    dim = getattr(kind, "dim", None)
    if isinstance(dim, int):
        return Shard(dim)
    name = getattr(kind, "value", None)
    if name in ("R", "I"):
        return Replicate()
    if name == "P":
        return Partial()
    if name == "V":
        return None
    raise PlacementError(f"{kind!r} is none of R, I, V, P and S(dim)")
