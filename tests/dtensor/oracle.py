"""What every coordinate holds, by cutting a NumPy array of indices as the definitions say."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.dtensor.geometry.placement import Packed, Shard

Array = np.ndarray[Any, Any]


def local_array(layout: Layout, coordinate: tuple[int, ...], whole: Array) -> Array:
    """Return the part of ``whole`` that a coordinate holds, one placement after the other."""
    for dim in range(whole.ndim):
        cuts = [(a, p) for a, p in enumerate(layout.placements) if p.is_shard(dim)]
        for axis, placement in sorted(cuts, key=_cutting_order):
            pieces = _cut(whole, dim, placement, layout.mesh.shape[axis])
            whole = pieces[coordinate[axis]]
    return whole


def _cutting_order(cut: tuple[int, Any]) -> tuple[int, int]:
    axis, placement = cut
    if isinstance(placement, Shard):
        return (1, axis if placement.order is None else placement.order)
    return (0, axis)


def _cut(whole: Array, dim: int, placement: Any, count: int) -> list[Array]:
    if isinstance(placement, Packed):
        parts = np.split(whole, np.cumsum(placement.sizes)[:-1], axis=dim)
        shares = [_cut(part, dim, Shard(dim), count) for part in parts]
        return [np.concatenate(held, axis=dim) for held in zip(*shares, strict=True)]
    if not isinstance(placement, Shard):
        ranges = placement.ranges_over(whole.shape[dim], count)
        indices = [[i for start, n in held for i in range(start, start + n)] for held in ranges]
        return [whole.take(np.array(chosen, dtype=int), axis=dim) for chosen in indices]
    chunk = -(-whole.shape[dim] // count)
    bounds = [min(i * chunk, whole.shape[dim]) for i in range(1, count)]
    return np.split(whole, bounds, axis=dim)
