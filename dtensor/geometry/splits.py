"""Splits: how the axes of a mesh cut the dims of a tensor, by their placements."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from dtckpt.errors import PlacementError

from .mesh import Mesh
from .order import Order
from .placement import Partial, Placement, Replicate, Shard, SplitPlacement, format_placements

_KNOWN = (SplitPlacement, Replicate, Partial)
"""A placement that is none of these would be taken for replicated."""


@dataclass(frozen=True, slots=True)
class Split:
    """One cut of a tensor dim by one mesh axis."""

    axis: int
    num_pieces: int
    starts: tuple[int, ...] | None
    """First index of every piece and the end of the last; None for the even chunks of a Shard,
    which may cut pieces of any extent."""
    order: Order | None = None
    """Where the pieces are several ranges each: the order of the indices in them. ``starts`` are
    places then."""

    def piece(self, index: int, extent: int) -> tuple[int, int]:
        """Return start and size of piece ``index`` of ``extent`` indices."""
        if self.starts is not None:
            return self.starts[index], self.starts[index + 1] - self.starts[index]
        chunk = -(-extent // self.num_pieces)
        start = min(index * chunk, extent)
        return start, min(chunk, extent - start)

    @property
    def largest(self) -> range:
        """Pieces one of which is the largest."""
        return range(1 if self.starts is None else self.num_pieces)

    def find(self, position: int, extent: int) -> int:
        """Return which piece holds ``position``."""
        if self.starts is not None:
            return bisect_right(self.starts, position) - 1
        return position // -(-extent // self.num_pieces)


def cut_by(
    given: object, mesh: Mesh, shape: tuple[int, ...]
) -> tuple[tuple[Placement, ...], tuple[tuple[Split, ...], ...]]:
    """Return placements in their one form, and the splits of every dim, in cutting order.

    Raises PlacementError where they do not fit the mesh and the shape of the tensor.
    """
    placements = _all_ours(given)
    if len(placements) != mesh.ndim:
        raise PlacementError(
            f"a mesh of {mesh.ndim} axes ({mesh}) needs as many placements, "
            f"got {len(placements)}: ({format_placements(placements)})"
        )
    placements = tuple(_normal(axis, p, mesh, shape) for axis, p in enumerate(placements))
    splits = tuple(_splits(dim, size, placements, mesh) for dim, size in enumerate(shape))
    return _without_default_order(placements, splits), splits


def _all_ours(placements: object) -> tuple[Placement, ...]:
    if isinstance(placements, list | tuple):
        found = tuple(cast(Sequence[object], placements))
        if all(isinstance(placement, _KNOWN) for placement in found):
            return cast(tuple[Placement, ...], found)
    raise PlacementError(
        f"placements must be a sequence of dtckpt's, one per axis, got {placements!r}; translate "
        "torch's with placements_from_torch"
    )


def _normal(axis: int, placement: Placement, mesh: Mesh, shape: tuple[int, ...]) -> Placement:
    if not isinstance(placement, SplitPlacement):
        return placement
    ndim = len(shape)
    if not -ndim <= placement.dim < ndim:
        raise PlacementError(
            f"{placement} on axis {mesh.axis_names[axis]!r} names dim {placement.dim}, "
            f"but a tensor of shape {shape} has {ndim} dims"
        )
    if not isinstance(placement, Shard):  # which always fits
        if "__dataclass_fields__" not in vars(type(placement)):  # two of them would be equal
            raise PlacementError(
                f"{type(placement).__qualname__} must be a dataclass, so that what it is made of "
                "counts where placements are compared; decorate it with @dataclass(frozen=True)"
            )
        problem = placement.misfit(shape[placement.dim], mesh.shape[axis])
        if problem:
            raise PlacementError(f"{placement} on axis {mesh.axis_names[axis]!r} {problem}")
    return placement if placement.dim >= 0 else replace(placement, dim=placement.dim + ndim)


def _splits(
    dim: int, size: int, placements: tuple[Placement, ...], mesh: Mesh
) -> tuple[Split, ...]:
    on_dim = [
        (axis, p)
        for axis, p in enumerate(placements)
        if isinstance(p, SplitPlacement) and p.dim == dim
    ]
    shards = [(axis, p) for axis, p in on_dim if isinstance(p, Shard)]
    first = [(axis, p) for axis, p in on_dim if not isinstance(p, Shard)]
    if len(first) > 1:
        raise PlacementError(
            f"({format_placements(placements)}): only one axis may cut dim {dim} raggedly, "
            "since its sizes are those of the whole dim"
        )
    orders = [p.order for _, p in shards if p.order is not None]
    if orders:
        if sorted(orders) != list(range(len(shards))):
            raise PlacementError(
                f"({format_placements(placements)}): the axes that shard dim {dim} need the "
                f"orders 0 to {len(shards) - 1}, each once, or none at all"
            )
        shards.sort(key=lambda item: item[1].order or 0)
    counts = mesh.shape
    return tuple(
        [_first_split(axis, p, size, counts[axis]) for axis, p in first]
        + [Split(axis, counts[axis], None) for axis, _ in shards]
    )


def _first_split(axis: int, placement: SplitPlacement, size: int, count: int) -> Split:
    starts = tuple(itertools.accumulate(placement.sizes_over(size, count), initial=0))
    return Split(axis, count, starts, placement.order_over(size, count))


def _without_default_order(
    placements: tuple[Placement, ...], splits: tuple[tuple[Split, ...], ...]
) -> tuple[Placement, ...]:
    # What is no Shard cuts first wherever it stands, and has no order.
    even = [[cut.axis for cut in cuts if cut.starts is None] for cuts in splits]
    in_mesh_order = [axes == sorted(axes) for axes in even]
    return tuple(
        replace(p, order=None)
        if isinstance(p, Shard) and p.order is not None and in_mesh_order[p.dim]
        else p
        for p in placements
    )
