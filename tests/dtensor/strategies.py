"""Hypothesis strategies for meshes, placements and layouts of every kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.dtensor.geometry.mesh import Mesh
from dtckpt.dtensor.geometry.placement import Packed, Placement, Ragged, Replicate, Shard


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 4, max_size: int = 16) -> Mesh:
    """A mesh of 1 to ``max_axes`` axes and at most ``max_size`` ranks, in any rank order."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        shape.append(draw(st.integers(1, max(1, min(5, max_size // math.prod(shape))))))
    size = math.prod(shape)
    ranks = draw(st.none() | st.permutations(range(size)).map(tuple))
    return Mesh(tuple(shape), ranks=ranks)


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 3, max_size: int = 9) -> tuple[int, ...]:
    """A tensor shape, 0-d and size-0 dims included."""
    return tuple(draw(st.lists(st.integers(0, max_size), max_size=max_dims)))


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    *,
    with_packed: bool = False,
) -> Layout:
    """Any layout: sharded, replicated, ordered, ragged, uneven, empty; packed ones if asked."""
    mesh = draw(meshes()) if mesh is None else mesh
    shape = draw(shapes()) if shape is None else tuple(shape)
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None for _ in mesh.shape]
    placements: list[Placement] = [Replicate() if d is None else Shard(d) for d in dims]
    for dim in range(len(shape)):
        axes = [axis for axis, d in enumerate(dims) if d == dim]
        if axes and draw(st.booleans()):
            axis = draw(st.sampled_from(axes))
            uneven = ragged(dim, shape[dim], mesh.shape[axis])
            placements[axis] = draw(uneven | packed(dim, shape[dim]) if with_packed else uneven)
            axes.remove(axis)
        if draw(st.booleans()):
            for order, axis in enumerate(draw(st.permutations(axes))):
                placements[axis] = Shard(dim, order)
    return Layout(mesh, tuple(placements), tuple(shape))


@st.composite
def ragged(draw: st.DrawFn, dim: int, size: int, count: int) -> Ragged:
    """A ragged placement of ``size`` indices over ``count`` coordinates."""
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    bounds = [0, *cuts, size]
    return Ragged(dim, tuple(b - a for a, b in itertools.pairwise(bounds)))


@st.composite
def packed(draw: st.DrawFn, dim: int, size: int) -> Packed:
    """A packed placement of ``size`` indices in parts of any sizes, empty ones included."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
    return Packed(dim, tuple(b - a for a, b in itertools.pairwise([0, *cuts, size])))
