"""Values that belong to a coordinate of a mesh, and not to a rank.

In the tree such a value is ``{"dict": {"mesh": ..., "values": {"per_rank": ...}}}``: the value of
every coordinate is kept by the first rank that has the coordinate, which the mesh says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from dtckpt.errors import Corrupt, PlacementError

from ...dtensor.comm.caches import remembered
from ...dtensor.geometry.mesh import Mesh

Axes = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Names of axes; or what to call them, each with its axis of a mesh or those that count as one."""
Coordinate = tuple[int, ...]
MESH, VALUES = "mesh", "values"
"""Keys of the node of such a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """What a rule knows that makes the values of a mesh of those of another one."""

    saved: Mesh
    """Axes and sizes at the save."""
    wanted: Mesh
    """Axes and sizes now."""
    coordinate: Coordinate
    """The coordinate of this rank, on ``wanted``."""


DealRule = Callable[[Mapping[Coordinate, Any], Dealing], Any]
"""Is given every saved value by its coordinate; returns that of this rank's coordinate now."""


@runtime_checkable
class Matcher(Protocol):
    """A rule that reads no more than it needs, and is asked where the meshes are alike, too."""

    def sources(self, dealing: Dealing, peek: Callable[[Coordinate], Any]) -> Iterable[Coordinate]:
        """Return the coordinates whose values are read; ``peek`` gives one without its tensors."""
        ...

    def value(self, dealing: Dealing, values: Mapping[Coordinate, Any]) -> Any:
        """Return the value of this rank's coordinate."""
        ...


@dataclass(slots=True)
class PerCoordinate:
    """A value that belongs to a coordinate of a mesh, such as the position of a data loader.

    Ranks that differ along other axes only have the same one, which is checked; it is saved once,
    and given back to all ranks at the same coordinate, whatever their numbers are and however many
    axes there are beside. ``axes`` are those that tell it: ``"dp"``, or ``{"dp": ("replicate",
    "shard")}`` where two of the mesh count as one, or ``()`` for what all ranks share. The mesh, of
    torch or ours, has all ranks of the save or load; without one ranks are numbered along an axis
    that ``axes`` names, else ``"rank"``.

    ``resize`` says what happens where ``axes`` have other sizes than at the save: ``"error"``; or
    ``"keep"``, by which coordinates that are new keep what they bring and those that are gone are
    dropped; or a function that is given all saved values by coordinate, and what there is to know
    as a ``Dealing``, and returns the one of this rank.

    An object with ``state_dict()`` and ``load_state_dict()`` is given what was saved as it is: its
    own state dict need not have the same form.

    >>> mesh = Mesh((2, 2), ("dp", "tp"))
    >>> places, own = PerCoordinate({"seen": 3}, mesh, axes="dp").place(3, range(4))
    >>> places.shape, places.all_ranks(), own
    ((2,), (0, 2), (1,))
    """

    value: Any
    mesh: Any = None
    axes: Axes | None = None
    resize: Literal["error", "keep"] | DealRule | Matcher = "error"

    def __post_init__(self) -> None:
        if isinstance(self.resize, str) and self.resize not in ("error", "keep"):
            raise ValueError(
                f"resize={self.resize!r}: expected 'error', 'keep' or a function of all values"
            )

    def place(self, rank: int, everyone: Sequence[int]) -> tuple[Mesh, Coordinate]:
        """Return the coordinates, each with the first rank that has it, and that of a rank.

        PlacementError where the mesh is not one of all ranks, or has not these axes.
        """
        if self.axes is not None and not self.axes:
            return Mesh((1,), ("all",), (min(everyone),)), (0,)
        if self.mesh is None:
            line = _line(self.axes, everyone)
            return line, line.coordinate(rank) or ()
        whole = layout_mesh(self.mesh)
        if set(whole.all_ranks()) != set(everyone):
            raise PlacementError(
                f"a value by coordinates of mesh {whole}, which has {whole.size} ranks; those that "
                f"take part are {len(everyone)}. Give the mesh of all ranks, of which axes= says "
                "which ones tell the value"
            )
        named = _named(self.axes, whole)
        own = whole.coordinate(rank) or ()
        places = _owners(whole, tuple(named.items()))
        return places, tuple(_index(whole, axes, own) for axes in named.values())


def layout_mesh(mesh: Any) -> Mesh:
    """Return who is where, of a mesh of torch or ours, or of such a value itself."""
    if isinstance(mesh, Mesh):
        return mesh
    ranks = mesh.mesh
    return Mesh(
        tuple(ranks.shape), tuple(mesh.mesh_dim_names or ()), tuple(ranks.flatten().tolist())
    )


def mesh_of_node(value: object, where: str) -> Mesh:
    """Return the mesh that a tree holds; Corrupt where it is none."""
    try:
        return Mesh.from_json(value)
    except PlacementError as error:
        raise Corrupt(f"{where}: {error}") from error


def _line(axes: Axes | None, everyone: Sequence[int]) -> Mesh:
    names = ["rank"] if axes is None else [axes] if isinstance(axes, str) else list(axes)
    if len(names) != 1:
        raise PlacementError(
            f"axes={names}: without a mesh ranks are numbered along one axis; give mesh="
        )
    return Mesh((len(everyone),), tuple(names), tuple(everyone))


def _named(axes: Axes | None, whole: Mesh) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the axes of a mesh that count as each named one."""
    if axes is None:
        axes = whole.axis_names
    if isinstance(axes, str):
        axes = (axes,)
    named = axes if isinstance(axes, Mapping) else {name: name for name in axes}
    found: dict[str, tuple[int, ...]] = {}
    for name, parts in named.items():
        told = (parts,) if isinstance(parts, str) else tuple(parts)
        unknown = [part for part in told if part not in whole.axis_names]
        if unknown:
            raise PlacementError(
                f"axes={axes}: mesh {whole} has no axis {unknown[0]!r}; it has "
                f"{list(whole.axis_names)}"
            )
        found[name] = tuple(whole.axis(part) for part in told)
    taken = [axis for parts in found.values() for axis in parts]
    if len(set(taken)) != len(taken) or not all(found.values()) or not found:
        raise PlacementError(f"axes={axes}: every axis of mesh {whole} counts at most once")
    return found


def _index(whole: Mesh, parts: tuple[int, ...], coordinate: Coordinate) -> int:
    """Return the index along some axes that count as one, the last one fastest."""
    index = 0
    for axis in parts:
        index = index * whole.shape[axis] + coordinate[axis]
    return index


@remembered(16)  # there may be thousands of coordinates, at every save
def _owners(whole: Mesh, named: tuple[tuple[str, tuple[int, ...]], ...]) -> Mesh:
    """Return the coordinates along some axes, each with the first rank that has it."""
    shape = tuple(math.prod(whole.shape[axis] for axis in parts) for _, parts in named)
    first: dict[Coordinate, int] = {}
    for coordinate in whole.coordinates():
        at = tuple(_index(whole, parts, coordinate) for _, parts in named)
        first.setdefault(at, whole.rank(coordinate))
    names = tuple(name for name, _ in named)
    return Mesh(shape, names, tuple(first[at] for at in sorted(first)))
