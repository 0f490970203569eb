"""The choice of a row per mesh axis, by the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from ...geometry.placement import Placement, Ragged, Shard, SplitPlacement, reductions
from ...mesh.spec import DTensorSpec, contiguous_spec, spec_of
from .factors import Dim, Dims, Factors, dim_of
from .table import Cuts, OpCall, Row, Rule
from .windows import bounds_of_pieces, even_bounds, sizes_between


@dataclass(frozen=True, slots=True)
class Choice:
    """The specs that inputs are brought to and that outputs have."""

    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec | None, ...]


def choose(call: OpCall, rule: Rule, fixed: tuple[Placement, ...] | None = None) -> Choice | None:
    """Return the cheapest choice of every axis, the axes one after the other.

    ``fixed`` are the placements that the first input has and must keep, as must the first output:
    those of a tensor that is written in place. None where some axis has no such row.
    """
    mesh = call.specs[0].mesh
    cuts = Cuts(mesh.shape, first_leads=fixed is not None)
    chosen: list[Row] = []
    for axis in range(mesh.ndim):
        candidates = rule.rows(axis, cuts)
        if fixed is not None:
            candidates = [row for row in candidates if _keeps(row, fixed[axis])]
        ranked = sorted(candidates, key=lambda row: _cost(row, call.specs, axis, mesh.shape[axis]))
        best = next((row for row in ranked if _commutes(row, chosen)), None)
        if best is None:
            return None
        chosen.append(best)
        if best.factor is not None:
            cuts.axes.setdefault(best.factor, []).append(axis)
    return _build(call, rule, chosen, cuts)


def _commutes(row: Row, chosen: Sequence[Row]) -> bool:
    """Whether every tensor still has a value: a sum of maxima is no maximum of sums."""
    for index, placement in enumerate((*row.inputs, *row.outputs) if chosen else ()):
        if placement.is_partial():
            earlier = [(*other.inputs, *other.outputs)[index] for other in chosen]
            if len(reductions([placement, *earlier])) > 1:
                return False
    return True


def _keeps(row: Row, placement: Placement) -> bool:
    return all(_alike(placement, given) for given in (row.inputs[0], row.outputs[0]))


def _alike(placement: Placement, wanted: Placement) -> bool:
    if isinstance(placement, SplitPlacement) and isinstance(wanted, SplitPlacement):
        return placement.dim == wanted.dim
    return placement == wanted


def _cost(row: Row, specs: Sequence[DTensorSpec], axis: int, count: int) -> tuple[float, int]:
    """Return the bytes that a rank receives, and how many inputs change."""
    total, changed = row.extra_bytes, 0
    for spec, wanted in zip(specs, row.inputs, strict=True):
        current = spec.placements[axis]
        if not _alike(current, wanted):
            changed += 1
            num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
            total += num_bytes * _share_received(current, wanted, count)
    return total, changed


def _share_received(current: Placement, wanted: Placement, count: int) -> float:
    lacking = (count - 1) / count
    if current.is_replicate():
        return 0.0
    if current.is_partial():
        return lacking if wanted.is_shard() else 2 * lacking
    return lacking / count if wanted.is_shard() else lacking


def _build(call: OpCall, rule: Rule, chosen: list[Row], cuts: Cuts) -> Choice:
    # Without factors nothing says which dims belong together: no order, nothing ragged.
    pieces = _Pieces(call, rule, cuts) if isinstance(rule, Factors) else None
    inputs: list[DTensorSpec] = []
    for index, spec in enumerate(call.specs):
        placements = [row.inputs[index] for row in chosen]
        if pieces is None:
            stays = spec.placements == tuple(placements)
        else:
            alike = all(_alike(a, b) for a, b in zip(spec.placements, placements, strict=True))
            stays = alike and pieces.leads(index)
        if stays:
            inputs.append(spec)
            continue
        if pieces is not None:
            pieces.refine(placements, pieces.factors.inputs[index], spec.shape)
        moved = spec.with_placements(placements)
        inputs.append(spec if moved.layout == spec.layout else contiguous_spec(moved))
    outputs: list[DTensorSpec | None] = []
    for index, meta in enumerate(call.outputs):
        if meta is None:
            outputs.append(None)
            continue
        placements = [row.outputs[index] for row in chosen]
        if pieces is not None:
            pieces.refine(placements, pieces.factors.outputs[index], meta.shape)
        spec = spec_of(call.specs[0].mesh, placements, meta.shape, meta.stride, meta.dtype)
        outputs.append(spec)
    return Choice(tuple(inputs), tuple(outputs))


class _Along(NamedTuple):
    """The dim of a tensor that runs along a factor."""

    dim: int
    steps: Dim
    size: int


def _along(factor: int, dims: Dims, shape: Sequence[int]) -> _Along | None:
    dim = dim_of(dims, factor)
    return None if dim is None else _Along(dim, dims[dim] or Dim(factor), shape[dim])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Order and sizes of the pieces of cut dims, which rows do not say."""

    call: OpCall
    factors: Factors
    cuts: Cuts

    def leads(self, index: int) -> bool:
        """Whether an input is the one that all its split factors take their cuts from."""
        present = {dim.factor for dim in self.factors.inputs[index] if dim is not None}
        return all(self._leader(f) == index for f in self.cuts.axes if f in present)

    def refine(self, placements: list[Placement], dims: Dims, shape: Sequence[int]) -> None:
        """Give sharded dims the order and the ragged sizes of the input that leads their factor."""
        for factor, axes in self.cuts.axes.items():
            target = _along(factor, dims, shape)
            if target is None:
                continue
            leader = self._leader(factor)
            if leader is not None:
                self._follow(placements, target.dim, factor, leader)
            if len(axes) == 1:
                placements[axes[0]] = self._resized(target, factor, leader)

    def _leader(self, factor: int) -> int | None:
        """Return the largest input that the chosen axes, and no others, cut at ``factor`` already.

        A tensor that is written in place goes before all others: it must not be cut anew.
        """
        if factor in self.factors.even:
            return None
        wanted = sorted(self.cuts.axes[factor])
        specs = self.call.specs
        best: int | None = None
        for index, (spec, dims) in enumerate(zip(specs, self.factors.inputs, strict=True)):
            dim = dim_of(dims, factor)
            if dim is None or sorted(s.axis for s in spec.layout.splits[dim]) != wanted:
                continue
            if spec.layout.orders[dim] is not None and not self.factors.takes_any_order(factor):
                continue  # this one is brought to even chunks
            if index == 0 and self.cuts.first_leads:
                return 0
            if best is None or math.prod(spec.shape) > math.prod(specs[best].shape):
                best = index
        return best

    def _follow(self, placements: list[Placement], dim: int, factor: int, leader: int) -> None:
        """Cut a dim in the order, and into the sizes, of the leading input."""
        given = self.call.specs[leader]
        cut = dim_of(self.factors.inputs[leader], factor) or 0
        even = [split.axis for split in given.layout.splits[cut] if split.starts is None]
        for axis in self.cuts.axes[factor]:
            current = given.placements[axis]
            if axis in even:
                placements[axis] = Shard(dim, even.index(axis))
            elif isinstance(current, SplitPlacement):
                placements[axis] = replace(current, dim=dim)

    def _resized(self, target: _Along, factor: int, leader: int | None) -> Placement:
        """Return the placement of a dim that one axis cuts, at the cuts of the leading input."""
        (axis,) = self.cuts.axes[factor]
        tensors = zip(self.factors.inputs, self.call.specs, strict=True)
        sides = [_along(factor, dims, spec.shape) for dims, spec in tensors]
        source = next(side for side in sides[leader or 0 :] if side is not None)
        count = self.cuts.mesh_shape[axis]
        led = leader is not None
        current = self.call.specs[leader].placements[axis] if led else Shard(source.dim)
        current = cast(SplitPlacement, current)
        sizes = current.sizes_over(source.size, count)
        extent = self.factors.extent(factor)
        if extent is None:
            scaled = tuple(size * source.steps.unit // target.steps.unit for size in sizes)
        else:
            bounds = even_bounds(extent, count)
            if led:
                bounds = bounds_of_pieces(sizes, source.steps.steps(extent), extent)
            scaled = sizes_between(bounds, target.steps.steps(extent))
        # The leader's own goes before even chunks: it is to lie as its output.
        order = current.order_over(source.size, count)
        for placement in (replace(current, dim=target.dim), Shard(target.dim)):
            sizes = placement.sizes_over(target.size, count)
            if sizes == scaled and placement.order_over(target.size, count) == order:
                return placement
        return Ragged(target.dim, scaled)
