"""The ranks that have a tensor, and the meshes on which it lies, as all of them say.

It depends on no single tensor, so it is worked out once for all that the same ranks have alike:
there are few different ones, but each may list thousands of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.mesh import Mesh
from ..ranks.text import ranks_text


@dataclass(frozen=True, slots=True)
class RanksOfMeshes:
    """Ranks whose tensors lie on the same meshes."""

    place: int
    """Where they come among all such groups, which is by their first ranks."""
    ranks: tuple[int, ...]
    meshes: tuple[Mesh, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """One group of ranks that has a tensor."""

    group: RanksOfMeshes
    report: int
    """Which of the reports on the tensor speaks of it."""
    mesh: Mesh | None
    """What the tensor lies on there."""


class Holders:
    """All groups of ranks that have a tensor."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self.sides = sorted(sides, key=lambda side: side.group.place)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All of them, sorted."""
        return tuple(sorted(rank for side in self.sides for rank in side.group.ranks))

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The different meshes, in the order of the groups."""
        return tuple(dict.fromkeys(side.mesh for side in self.sides if side.mesh is not None))

    @cached_property
    def are_alike(self) -> bool:
        """Whether all meshes are one, or siblings of the first."""
        return all(are_siblings(self.meshes[0], mesh) for mesh in self.meshes[1:])

    @cached_property
    def joined(self) -> Mesh | LayoutMismatch:
        """One mesh for all.

        Under data plus tensor parallelism, what only the data axis shards lies so: every line of
        ranks along that axis is a mesh of its own and holds a copy. The joined mesh has an axis of
        copies.
        """
        first, *others = self.meshes
        return _join(self.meshes) if others else first

    @cached_property
    def absent(self) -> list[int]:
        """The ranks of the joined mesh that do not have the tensor."""
        if isinstance(self.joined, LayoutMismatch):
            return []
        return sorted(set(self.joined.all_ranks()) - set(self.ranks))

    @cached_property
    def line(self) -> Mesh:
        """A mesh of nothing but the ranks, for tensors without one."""
        return Mesh((len(self.ranks),), ("rank",), self.ranks)


def are_siblings(one: Mesh, other: Mesh) -> bool:
    """Whether two meshes have one form and no rank in common."""
    return one.shape == other.shape and set(one.all_ranks()).isdisjoint(other.all_ranks())


def _join(meshes: tuple[Mesh, ...]) -> Mesh | LayoutMismatch:
    taken = meshes[0].axis_names
    label = next(n for n in ("copy", *(f"copy{i}" for i in range(len(taken)))) if n not in taken)
    ranks = tuple(rank for mesh in meshes for rank in mesh.all_ranks())
    if len(set(ranks)) != len(ranks):
        return LayoutMismatch(
            f"lies on {len(meshes)} meshes, some of which share ranks: "
            f"{', '.join(ranks_text(mesh.all_ranks()) for mesh in meshes)}"
        )
    return Mesh((len(meshes), *meshes[0].shape), (label, *taken), ranks)
