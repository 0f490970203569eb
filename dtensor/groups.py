"""Process groups of a mesh: given ones are checked, missing ones are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from dtckpt.errors import PlacementError

from .mesh import Mesh

Axes = tuple[int, ...]


def given_groups(mesh: Mesh, groups: Sequence[Any] | None, world_group: Any) -> dict[Axes, Any]:
    """Return groups by the axes that they run along; PlacementError for wrong sizes."""
    found: dict[Axes, Any] = {}
    if groups is not None:
        sizes = tuple(group.size() for group in groups)
        if sizes != mesh.shape:
            raise PlacementError(
                f"a mesh of shape {mesh.shape} needs one group per axis of these sizes, "
                f"got groups of sizes {sizes}"
            )
        found.update(((axis,), group) for axis, group in enumerate(groups))
    if world_group is not None:
        if world_group.size() != mesh.size:
            raise PlacementError(
                f"the world group of a mesh of {mesh.size} ranks has {world_group.size()}"
            )
        found.setdefault(tuple(range(mesh.ndim)), world_group)
    return found


def make_group(mesh: Mesh, axes: Axes, ranks_along: Callable[[Axes], tuple[int, ...]]) -> Any:
    """Return a new group of the ranks along ``axes``; only they need to reach this call.

    Raises PlacementError where torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        names = tuple(mesh.axis_names[axis] for axis in axes)
        raise PlacementError(
            f"mesh {mesh} has no process group over {names}: initialise torch.distributed, or pass "
            "groups= and world_group= to the DeviceMesh"
        )
    ranks = ranks_along(axes)
    if set(ranks) == set(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(list(ranks), use_local_synchronization=True)


def check_group_ranks(group: Any, expected: tuple[int, ...], axis_name: str) -> None:
    """Raise PlacementError where a group knows its global ranks and they are not those expected."""
    actual = ranks_of(group)
    if actual is not None and sorted(actual) != sorted(expected):
        raise PlacementError(
            f"the group of axis {axis_name!r} has ranks {actual}, but the mesh has "
            f"{list(expected)} there"
        )


def ranks_of(group: Any) -> list[int] | None:
    """Return the global rank of every group rank, or None for a group registered nowhere."""
    if not dist.is_initialized():
        return None
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return None
