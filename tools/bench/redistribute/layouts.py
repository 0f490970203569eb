"""Which layouts a tensor is moved between, and what each rank holds of it in them.

The arithmetic is written again here, on numpy alone, so that what the planner of the library says
is compared with something that does not come from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtckpt.dtensor import Partial, Placement, Replicate, Shard

from ..distributed import Axis

Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How a tensor lies on a mesh."""

    axes: Axes
    order: tuple[int, ...] = ()
    """In which order the axes cut; those left out cut after them, in the order of the mesh."""

    def cuts(self, dim: int) -> list[int]:
        """Return the axes that cut a dim, the outermost first."""
        ranked = [*self.order, *(a for a in range(len(self.axes)) if a not in self.order)]
        return [axis for axis in ranked if self.axes[axis] == dim]

    def placements(self) -> tuple[Placement, ...]:
        """Return it as placements of the library."""
        return tuple(self._placement(axis) for axis in range(len(self.axes)))

    def _placement(self, axis: int) -> Placement:
        cut = self.axes[axis]
        if isinstance(cut, int):
            return Shard(cut, self.cuts(cut).index(axis) if self.order else None)
        return Replicate() if cut is None else Partial(cut)

    def __str__(self) -> str:
        names = [f"S{c}" if isinstance(c, int) else ("R" if c is None else "P") for c in self.axes]
        if not self.order:
            return f"[{', '.join(names)}]"
        for axis, cut in enumerate(self.axes):
            if isinstance(cut, int):
                names[axis] += f"/{self.cuts(cut).index(axis)}"
        return f"[{', '.join(names)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change from one layout to another of the same mesh."""

    mesh: tuple[int, ...]
    source: Held
    target: Held

    @property
    def is_shard_to_shard(self) -> bool:
        """Whether some axis cuts one dim before and another one after."""
        pairs = zip(self.source.axes, self.target.axes, strict=True)
        return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)

    def is_local(self, shape: Sequence[int]) -> bool:
        """Whether every rank holds what it is to hold."""
        is_reduced = "sum" in self.source.axes
        return not is_reduced and not lacking(self.source, self.target, self.mesh, shape).any()

    def __str__(self) -> str:
        return f"{self.mesh} {self.source} -> {self.target}"


def transitions(mesh: tuple[int, ...], ndim: int, *, partial: bool = False) -> list[Transition]:
    """Return all ordered pairs of different layouts of shards and replicas, in the default order.

    With ``partial`` there are also those from every layout that has an axis of terms.
    """
    plain: list[Axis] = [None, *range(ndim)]
    sources: list[Axis] = [*plain, "sum"] if partial else plain
    return [
        Transition(mesh=mesh, source=Held(axes=source), target=Held(axes=target))
        for source in itertools.product(sources, repeat=len(mesh))
        for target in itertools.product(plain, repeat=len(mesh))
        if source != target
    ]


def ordered_transitions(mesh: tuple[int, ...], ndim: int) -> list[Transition]:
    """Return all pairs in which a layout cuts in another order than that of the mesh."""
    helds = [
        Held(axes=axes, order=order)
        for axes in itertools.product([None, *range(ndim)], repeat=len(mesh))
        for order in _orders(axes)
    ]
    return [
        Transition(mesh=mesh, source=source, target=target)
        for source, target in itertools.permutations(helds, 2)
        if source.order or target.order
    ]


def _orders(axes: Axes) -> list[tuple[int, ...]]:
    """Return the default order, and all others that make a difference to it."""
    cutting = [axis for axis, cut in enumerate(axes) if isinstance(cut, int)]
    found: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
    for order in itertools.permutations(cutting):
        held = Held(axes=axes, order=order)
        found.setdefault(tuple(tuple(held.cuts(d)) for d in range(len(axes) + 1)), order)
    return [() if list(order) == cutting else order for order in found.values()]


Boxes = np.ndarray[tuple[int, int, int], np.dtype[np.int64]]
"""By rank and dim: the first index and one past the last."""


def boxes_of(held: Held, mesh: tuple[int, ...], shape: Sequence[int]) -> Boxes:
    """Return what every rank of the mesh holds.

    A dim is cut like ``torch.chunk`` cuts it, and each piece is cut again by the next axis.

    >>> boxes_of(Held(axes=(0, 1)), (2, 2), (3, 4)).tolist()[2]
    [[2, 3], [0, 2]]
    """
    size = math.prod(mesh)
    coordinates = np.stack(np.unravel_index(np.arange(size), mesh))
    boxes = np.zeros((size, len(shape), 2), dtype=np.int64)
    for dim, extent in enumerate(shape):
        start = np.zeros(size, dtype=np.int64)
        end = np.full(size, extent, dtype=np.int64)
        for axis in held.cuts(dim):
            step = -(-(end - start) // mesh[axis])
            start, end = (
                np.minimum(start + coordinates[axis] * step, end),
                np.minimum(start + (coordinates[axis] + 1) * step, end),
            )
        boxes[:, dim, 0], boxes[:, dim, 1] = start, end
    return boxes


def numels(boxes: Boxes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how many elements each box has."""
    sizes = np.maximum(boxes[..., 1] - boxes[..., 0], 0)
    return sizes.prod(axis=1)


def lacking(
    source: Held, target: Held, mesh: tuple[int, ...], shape: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how many elements of its target box each rank does not hold: no plan receives less.

    >>> lacking(Held(axes=(0,)), Held(axes=(1,)), (2,), (4, 4)).tolist()
    [4, 4]
    """
    old, new = boxes_of(source, mesh, shape), boxes_of(target, mesh, shape)
    common = np.empty_like(new)
    common[..., 0] = np.maximum(old[..., 0], new[..., 0])
    common[..., 1] = np.minimum(old[..., 1], new[..., 1])
    return numels(new) - numels(common)
