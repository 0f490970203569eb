"""The ranks of two meshes, and the process group over which they exchange."""

from __future__ import annotations

from dataclasses import dataclass

from dtckpt.errors import PlacementError

from ..comm.collectives import Peers
from ..comm.groups import group_over, ranks_of
from ..mesh.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Union:
    """The ranks of two meshes, by their position among the peers."""

    ranks: tuple[int, ...]
    peers: Peers


def union_of(source: DeviceMesh, target: DeviceMesh) -> Union:
    """Return the ranks of two meshes with a group of exactly these.

    It is that of a mesh which has all of them, else one that is made once and kept, which all of
    these ranks have to reach. Raises PlacementError, on every rank, where a mesh is another one on
    other ranks, and where there is no group and nobody to make one.
    """
    ranks = set(source.layout_mesh.all_ranks()) | set(target.layout_mesh.all_ranks())
    for mesh in (source, target):
        _require_one_mesh(mesh, ranks)
    for mesh in (source, target, source.root, target.root, source.within, target.within):
        if mesh is not None and set(mesh.layout_mesh.all_ranks()) == ranks:
            everyone = tuple(range(mesh.ndim))
            if mesh.can_group(everyone):
                return Union(mesh.layout_mesh.all_ranks(), mesh.peers(everyone))
    ordered = tuple(sorted(ranks))
    group = group_over(ordered)
    registered = ranks_of(group) or list(ordered)
    positions = tuple(registered.index(rank) for rank in ordered)
    return Union(ordered, Peers(group, positions, ordered, source.device_type))


def _require_one_mesh(mesh: DeviceMesh, ranks: set[int]) -> None:
    """Raise PlacementError for the part of a mesh through this rank, if others have other parts."""
    own, whole = set(mesh.layout_mesh.all_ranks()), set(mesh.root.layout_mesh.all_ranks())
    if (ranks - own) & whole:
        raise PlacementError(
            f"{mesh!r} is a part of {mesh.root!r}, and another one on other ranks of it that would "
            "take part; redistribute within the whole mesh, or make both meshes of all their ranks"
        )
