"""The steps of a redistribute plan: what each does to this rank's local tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from .box import Box
from .collectives import (
    Peers,
    all_gather,
    all_gather_even,
    all_reduce,
    all_to_all,
    from_bytes,
    reduce_scatter,
)
from .device_mesh import DeviceMesh
from .layout import Layout
from .mesh import unravel


class Step(Protocol):
    """One step of a plan."""

    def run(self, local: Tensor) -> Tensor:
        """Return the local tensor after the step."""
        ...


@dataclass(frozen=True, slots=True)
class ReduceAxis:
    """Partial to Replicate along one axis: an all-reduce."""

    peers: Peers
    reduce_op: str

    def run(self, local: Tensor) -> Tensor:
        """Return the reduction."""
        return all_reduce(local, self.reduce_op, self.peers)

    def __str__(self) -> str:
        return f"all-reduce({self.reduce_op}) over {self.peers.size} ranks"


@dataclass(frozen=True, slots=True)
class ReduceScatterAxis:
    """Partial to Shard along one axis: a reduce-scatter."""

    peers: Peers
    reduce_op: str
    boxes: tuple[Box, ...]
    """What each rank along the axis gets, in this rank's local coordinates."""

    @classmethod
    def plan(cls, mesh: DeviceMesh, source: Layout, target: Layout, axis: int) -> ReduceScatterAxis:
        """Return the step from Partial on ``axis`` to a shard that is the last cut of its dim."""
        here = _coordinate(mesh)
        own = source.box(here)
        boxes = tuple(
            target.box(_at(here, axis, i)).relative_to(own) for i in range(mesh.shape[axis])
        )
        reduce_op = getattr(source.placements[axis], "reduce_op", "sum")
        return cls(mesh.peers((axis,)), reduce_op, boxes)

    def run(self, local: Tensor) -> Tensor:
        """Return this rank's part of the reduction."""
        pieces = [local[box.slices] for box in self.boxes]
        return reduce_scatter(pieces, self.reduce_op, self.peers)

    def __str__(self) -> str:
        return f"reduce-scatter({self.reduce_op}) over {self.peers.size} ranks"


@dataclass(frozen=True, slots=True)
class Slice:
    """Every rank already holds what it wants: a local copy of a box, without communication."""

    box: Box

    def run(self, local: Tensor) -> Tensor:
        """Return a copy, which lets the larger tensor go."""
        return local[self.box.slices].clone(memory_format=torch.contiguous_format)

    def __str__(self) -> str:
        return f"local slice {self.box}"


@dataclass(frozen=True, slots=True)
class GatherAxis:
    """Shard to Replicate along one axis that cuts last: an all-gather."""

    peers: Peers
    dim: int
    shapes: tuple[tuple[int, ...], ...]

    def run(self, local: Tensor) -> Tensor:
        """Return the pieces of all ranks along the axis, joined."""
        if self.peers.is_in_order and self.shapes.count(self.shapes[0]) == len(self.shapes):
            stacked = all_gather_even(local, self.peers)
            return stacked.flatten(0, 1) if self.dim == 0 else torch.cat(stacked.unbind(), self.dim)
        return torch.cat(all_gather(local, self.shapes, self.peers), self.dim)

    def __str__(self) -> str:
        return f"all-gather along dim {self.dim} over {self.peers.size} ranks"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Any shards to any shards: each rank gets exactly the boxes it lacks, in one all-to-all."""

    peers: Peers
    sends: tuple[Box | None, ...]
    """What goes to each rank, in coordinates of the old local tensor."""
    receives: tuple[Box | None, ...]
    """What comes from each rank, in coordinates of the new local tensor."""
    kept: tuple[Box, Box] | None
    """What this rank already has: where it was and where it goes."""
    sizes: tuple[int, ...]
    """Shape of the new local tensor."""

    def run(self, local: Tensor) -> Tensor:
        """Return the new local tensor."""
        sends = [None if box is None else local[box.slices] for box in self.sends]
        size = local.element_size()
        incoming = [0 if box is None else box.numel * size for box in self.receives]
        parts = all_to_all(sends, incoming, self.peers, local.device)
        made = local.new_empty(self.sizes)
        for box, part in zip(self.receives, parts, strict=True):
            if box is not None:
                made[box.slices] = from_bytes(part, local.dtype, box.sizes)
        if self.kept is not None:
            old, new = self.kept
            made[new.slices] = local[old.slices]
        return made

    def __str__(self) -> str:
        numel = sum(box.numel for box in self.receives if box is not None)
        return f"exchange over {self.peers.size} ranks, {numel} elements arrive"


@dataclass(frozen=True, slots=True)
class SpreadTerm:
    """Replicate to Partial: values that reduce to what they were."""

    reduce_op: str
    is_first: bool

    def run(self, local: Tensor) -> Tensor:
        """Return the values in one term and the identity in the others, or copies in all."""
        if self.is_first or self.reduce_op not in ("sum", "product"):
            return local.clone()
        return torch.full_like(local, 1 if self.reduce_op == "product" else 0)

    def __str__(self) -> str:
        return f"one term of {self.reduce_op}"


def plan_move(mesh: DeviceMesh, source: Layout, target: Layout) -> Step | None:
    """Return the step between layouts of shards and replicas, or None where they are equal.

    Axes that are Partial in both stay so: terms move only between ranks of the same term.
    """
    if source.splits == target.splits:
        return None
    here = _coordinate(mesh)
    own, wanted = source.box(here), target.box(here)
    if _cuts_further(source, target):
        return Slice(wanted.relative_to(own))
    axis = _single_axis(source, target)
    if axis is not None and _cuts_further(target, source):
        dim = next(d for d, cuts in enumerate(source.splits) if cuts != target.splits[d])
        shapes = [source.box(_at(here, axis, i)).sizes for i in range(mesh.shape[axis])]
        return GatherAxis(mesh.peers((axis,)), dim, tuple(shapes))
    axes = tuple(range(mesh.ndim)) if axis is None else (axis,)
    return _plan_exchange(mesh, source, target, axes)


def _cuts_further(source: Layout, target: Layout) -> bool:
    """Whether the target only cuts the pieces of the source again: all is there already."""
    return all(
        new[: len(old)] == old for old, new in zip(source.splits, target.splits, strict=True)
    )


def _single_axis(source: Layout, target: Layout) -> int | None:
    """Return the axis that alone moves and cuts last before and after, if there is one.

    Ranks that differ along such an axis hold all that they want between them.
    """
    changed: set[int] = set()
    for old, new in zip(source.splits, target.splits, strict=True):
        if old != new:
            shared = 0
            while shared < min(len(old), len(new)) and old[shared] == new[shared]:
                shared += 1
            changed.update(split.axis for split in (*old[shared:], *new[shared:]))
    return changed.pop() if len(changed) == 1 else None


def _plan_exchange(
    mesh: DeviceMesh, source: Layout, target: Layout, axes: tuple[int, ...]
) -> Exchange:
    here = _coordinate(mesh)
    own, wanted = source.box(here), target.box(here)
    shape = tuple(mesh.shape[axis] for axis in axes)
    others = [_moved(here, axes, unravel(i, shape)) for i in range(math.prod(shape))]
    me = others.index(here)
    sends = [_given(source, target, here, other, own) for other in others]
    receives = [_given(source, target, other, here, wanted) for other in others]
    old, new = sends[me], receives[me]
    kept = None if old is None or new is None else (old, new)
    sends[me] = receives[me] = None
    return Exchange(mesh.peers(axes), tuple(sends), tuple(receives), kept, wanted.sizes)


def _given(
    source: Layout,
    target: Layout,
    giver: tuple[int, ...],
    taker: tuple[int, ...],
    frame: Box,
) -> Box | None:
    """Return what ``giver`` sends to ``taker``, in the coordinates of ``frame``.

    Of the replicas of a cell, a rank takes from the one that has its own coordinate along all
    axes that replicate: the nearest, and the load is even.
    """
    if any(giver[axis] != taker[axis] for axis in source.replica_axes):
        return None
    common = source.box(giver).intersect(target.box(taker))
    return None if common is None else common.relative_to(frame)


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    here = mesh.get_coordinate()
    if here is None:
        raise PlacementError(
            f"this rank is not in the mesh {mesh.layout_mesh} and cannot plan for it"
        )
    return here


def _at(coordinate: tuple[int, ...], axis: int, index: int) -> tuple[int, ...]:
    return (*coordinate[:axis], index, *coordinate[axis + 1 :])


def _moved(
    coordinate: tuple[int, ...], axes: Sequence[int], indices: Sequence[int]
) -> tuple[int, ...]:
    moved = list(coordinate)
    for axis, index in zip(axes, indices, strict=True):
        moved[axis] = index
    return tuple(moved)
