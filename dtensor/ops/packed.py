"""Several tensors in one: dims with parts that are sharded by themselves, split and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import Packed, Placement, Shard
from ..mesh.spec import DTensorSpec
from .engine.table import Cuts, LocalCall, LocalMaker, OpCall, Row, Rule

aten = torch.ops.aten

_MAX_PARTS = 16
"""So many tensors side by side are left as they lie; a tensor that grows in a loop is not."""


@dataclass(frozen=True, slots=True)
class AsTheyLie:
    """The rule of a call whose inputs stay as they are."""

    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]
    local: LocalMaker | None = None

    def rows(self, axis: int, cuts: Cuts) -> Sequence[Row]:
        """Return the row of the placements that there are."""
        del cuts
        inputs = tuple(placements[axis] for placements in self.inputs)
        outputs = tuple(placements[axis] for placements in self.outputs)
        return [Row(inputs, outputs)]


def split_parts(call: OpCall, dim: int, windows: Sequence[range]) -> Rule | None:
    """Return the rule of a split of a packed dim at the borders of its parts; None for others.

    A part that is taken out whole is sharded, and nothing moves.
    """
    (source,) = call.specs
    axis = _only_axis(source, dim)
    packed = None if axis is None else source.placements[axis]
    if axis is None or not isinstance(packed, Packed):
        return None
    starts = list(accumulate(packed.sizes, initial=0))
    outputs: list[tuple[Placement, ...]] = []
    firsts: list[int] = []
    for window in windows:
        if window.step != 1 or not {window.start, window.stop} <= {*starts}:
            return None
        first = starts.index(window.start)
        sizes = packed.sizes[first : starts.index(window.stop, first)]
        if not sizes:
            return None
        firsts.append(first)
        part = Shard(dim) if len(sizes) == 1 else Packed(dim, sizes)
        outputs.append(_with(source.placements, axis, part))
    return AsTheyLie((source.placements,), tuple(outputs), _local_parts(dim, axis, packed, firsts))


def _local_parts(dim: int, axis: int, packed: Packed, firsts: Sequence[int]) -> LocalMaker:
    def maker(local: LocalCall) -> Callable[..., Any] | None:
        mesh = local.inputs[0].mesh
        here = mesh.get_coordinate()
        if here is None:
            return None
        pieces = [sizes[here[axis]] for sizes in packed.pieces_over(mesh.shape[axis])]
        starts = list(accumulate(pieces, initial=0))
        ranges = [
            (starts[first], starts[first] + (0 if spec is None else spec.local_shape[dim]))
            for first, spec in zip(firsts, local.outputs, strict=True)
        ]

        def run(tensor: Tensor, *_: Any, **__: Any) -> Any:
            taken = [aten.slice.Tensor(tensor, dim, start, end) for start, end in ranges]
            return taken[0] if local.op is aten.slice.Tensor else taken

        return run

    return maker


def join_parts(call: OpCall, dim: int) -> Rule | None:
    """Return the rule of tensors that are sharded alike along a dim, joined there; None for others.

    Each rank joins what it has, and the dim is packed of the tensors.
    """
    first = call.specs[0]
    axis = _only_axis(first, dim)
    sizes: list[int] = []
    for spec in call.specs:
        own = None if axis is None or spec.ndim != first.ndim else spec.placements[axis]
        if axis is None or own is None or _only_axis(spec, dim) != axis:
            return None
        if _with(spec.placements, axis, Shard(dim)) != _with(first.placements, axis, Shard(dim)):
            return None
        if not isinstance(own, Packed) and own != Shard(dim):
            return None
        sizes += own.sizes if isinstance(own, Packed) else [spec.shape[dim]]
    if axis is None or not 1 < len(sizes) <= _MAX_PARTS:
        return None
    output = _with(first.placements, axis, Packed(dim, tuple(sizes)))
    return AsTheyLie(tuple(spec.placements for spec in call.specs), (output,))


def _only_axis(spec: DTensorSpec, dim: int) -> int | None:
    """Return the axis that alone cuts a dim."""
    cuts = spec.layout.splits[dim] if dim < spec.ndim else ()
    return cuts[0].axis if len(cuts) == 1 else None


def _with(
    placements: tuple[Placement, ...], axis: int, placement: Placement
) -> tuple[Placement, ...]:
    return (*placements[:axis], placement, *placements[axis + 1 :])
