"""Heads of attention over the ranks: layers are split between heads, never within one.

Where there are fewer heads than ranks, as of keys and values that several queries share, each head
is on several ranks. The mesh is then seen as one of heads and copies: weights are sharded along the
first axis and replicated along the second, along which their gradients are summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Partial, Placement, Ragged, Replicate, Shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.torch_layouts import AnyPlacement
from .inputs import distributed

_NAMES = ("heads", "copies")


def has_copies(heads: int | None, mesh: DeviceMesh) -> bool:
    """Whether there are fewer heads than ranks, so that each is on several.

    Raises PlacementError where they would be on different numbers of ranks.
    """
    if heads is None or heads >= mesh.size():
        return False
    if mesh.size() % heads:
        raise PlacementError(
            f"{heads} heads cannot each be on as many of {mesh.size()} ranks; use a number of "
            f"ranks that is a multiple of {heads}, or no larger"
        )
    return True


def with_copies(heads: int, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the same ranks with an axis of heads and one of copies."""
    return mesh.unflatten(0, (heads, mesh.size() // heads), _NAMES)


def split_between(dim: int, size: int, heads: int | None, mesh: DeviceMesh) -> Placement:
    """Return the placement of a dim of so many heads: each rank has some, or a copy of one.

    Raises PlacementError where the dim does not consist of so many.
    """
    if heads is None or has_copies(heads, mesh):
        return Shard(dim)
    if heads % mesh.size() == 0:
        return Shard(dim)
    some, more = divmod(heads, mesh.size())  # no rank is without, as chunks would leave one
    counts = (some + (rank < more) for rank in range(mesh.size()))
    return Ragged(dim, tuple(count * (size // heads) for count in counts))


def require_groups(numbers: Mapping[str, int], mesh: DeviceMesh) -> None:
    """Raise PlacementError where ranks would have heads without those that they are grouped with.

    ``numbers`` are the heads of layers beside each other, by name. Some may be a multiple of
    others, as queries of keys and values: rank by rank, they then have to be that.
    """
    count = mesh.size()
    for (few, least), (many, most) in itertools.permutations(numbers.items(), 2):
        if most <= max(least, count) or most % least:
            continue
        if most % count or (least % count and count % least):
            remedy = (
                f"use a number of ranks that divides {most}"
                if least < count
                else f"give {many!r} heads={least}, too, which are the groups that stay together"
            )
            raise PlacementError(
                f"{many!r} has {most} heads and {few!r} {least}, of which {count} ranks would not "
                f"have the same groups; {remedy}"
            )


def require_heads(heads: object, size: int, what: str) -> None:
    """Raise PlacementError unless a dim of some size consists of so many heads."""
    if type(heads) is not int or heads < 1 or size % heads:
        raise PlacementError(
            f"{what} of {size} features cannot have {heads!r} heads of equal size; give their "
            "number"
        )


def to_copies(
    value: Any, now: AnyPlacement, mesh: DeviceMesh, copies: DeviceMesh, where: str
) -> DTensor:
    """Return an input, whole on every rank, as a tensor on the mesh with copies.

    Each rank has a term of its gradient, which are added up once, on the way back to ``mesh``.
    """
    whole = distributed(value, now, Replicate(), mesh, where)
    terms = [Partial()] * copies.ndim
    local = whole.to_local(grad_placements=[Partial()])
    return DTensor.from_local(local, copies, [Replicate()] * copies.ndim, grad_placements=terms)


def from_copies(output: object) -> Tensor:
    """Return the local part of what a layer with copies made; gradients differ between copies."""
    made = cast(DTensor, output)
    split, *rest = made.placements
    return made.to_local(grad_placements=[split, *[Partial()] * len(rest)])
