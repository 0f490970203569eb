"""The choice of a row per mesh axis, by the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..placement import Placement, Ragged, Shard
from ..spec import DTensorSpec, contiguous_spec, spec_of
from .factors import Dim, Dims, Factors, dim_of, piece_sizes
from .table import Cuts, OpCall, Row, Rows
from .windows import bounds_of_pieces, even_bounds, sizes_between


@dataclass(frozen=True, slots=True)
class Choice:
    """The specs that inputs are brought to and that outputs have."""

    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec | None, ...]


def choose(call: OpCall, rows: Rows, fixed: tuple[Placement, ...] | None = None) -> Choice | None:
    """Return the cheapest choice of every axis, the axes one after the other.

    ``fixed`` are the placements that the first input has and must keep, as must the first output:
    those of a tensor that is written in place. None where some axis has no such row.
    """
    mesh = call.specs[0].mesh
    cuts = Cuts(mesh.shape, first_leads=fixed is not None)
    chosen: list[Row] = []
    for axis in range(mesh.ndim):
        candidates = rows.rows(axis, cuts)
        if fixed is not None:
            candidates = [row for row in candidates if _keeps(row, fixed[axis])]
        if not candidates:
            return None
        best = min(candidates, key=lambda row: _cost(row, call.specs, axis, mesh.shape[axis]))
        chosen.append(best)
        if best.factor is not None:
            cuts.axes.setdefault(best.factor, []).append(axis)
    return _build(call, rows, chosen, cuts)


def _keeps(row: Row, placement: Placement) -> bool:
    return all(_alike(placement, given) for given in (row.inputs[0], row.outputs[0]))


def _alike(placement: Placement, wanted: Placement) -> bool:
    if isinstance(placement, Shard | Ragged) and isinstance(wanted, Shard | Ragged):
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


def _build(call: OpCall, rows: Rows, chosen: list[Row], cuts: Cuts) -> Choice:
    factors = rows if isinstance(rows, Factors) else None
    mesh = call.specs[0].mesh
    inputs: list[DTensorSpec] = []
    for index, spec in enumerate(call.specs):
        plain = [row.inputs[index] for row in chosen]
        if _stays(index, spec, plain, call, factors, cuts):
            inputs.append(spec)
            continue
        dims = factors.inputs[index] if factors else None
        placements = _refined(plain, dims, spec.shape, call, factors, cuts)
        moved = spec.with_placements(placements)
        inputs.append(spec if moved.layout == spec.layout else contiguous_spec(moved))
    outputs: list[DTensorSpec | None] = []
    for index, meta in enumerate(call.outputs):
        if meta is None:
            outputs.append(None)
            continue
        plain = [row.outputs[index] for row in chosen]
        dims = factors.outputs[index] if factors else None
        placements = _refined(plain, dims, meta.shape, call, factors, cuts)
        outputs.append(spec_of(mesh, placements, meta.shape, meta.stride, meta.dtype))
    return Choice(tuple(inputs), tuple(outputs))


def _stays(
    index: int,
    spec: DTensorSpec,
    plain: list[Placement],
    call: OpCall,
    factors: Factors | None,
    cuts: Cuts,
) -> bool:
    if factors is None:  # nothing says which dims belong together: no order, nothing ragged
        return spec.placements == tuple(plain)
    alike = all(_alike(a, b) for a, b in zip(spec.placements, plain, strict=True))
    return alike and _leads(index, call, factors, cuts)


def _leads(index: int, call: OpCall, factors: Factors, cuts: Cuts) -> bool:
    """Whether an input is the one that all its split factors take their cuts from."""
    present = {dim.factor for dim in factors.inputs[index] if dim is not None}
    return all(_leader(f, call, factors, cuts) == index for f in cuts.axes if f in present)


def _leader(factor: int, call: OpCall, factors: Factors, cuts: Cuts) -> int | None:
    """Return the largest input that the chosen axes, and no others, cut at ``factor`` already.

    A tensor that is written in place goes before all others: it must not be cut anew.
    """
    if factor in factors.even:
        return None
    wanted = sorted(cuts.axes[factor])
    best: int | None = None
    for index, (spec, dims) in enumerate(zip(call.specs, factors.inputs, strict=True)):
        dim = dim_of(dims, factor)
        if dim is None or sorted(s.axis for s in spec.layout.splits[dim]) != wanted:
            continue
        if index == 0 and cuts.first_leads:
            return 0
        if best is None or math.prod(spec.shape) > math.prod(call.specs[best].shape):
            best = index
    return best


def _refined(
    plain: list[Placement],
    dims: Dims | None,
    shape: Sequence[int],
    call: OpCall,
    factors: Factors | None,
    cuts: Cuts,
) -> list[Placement]:
    """Give sharded dims the order and the ragged sizes of the input that leads their factor."""
    placements = list(plain)
    if factors is None or dims is None:
        return placements
    for factor, axes in cuts.axes.items():
        dim, leader = dim_of(dims, factor), _leader(factor, call, factors, cuts)
        if dim is None:
            continue
        if leader is None:
            if len(axes) == 1:
                found = _resized(call, factors, factor, axes[0], dims, dim, shape, cuts)
                placements[axes[0]] = found
            continue
        source = call.specs[leader]
        source_dim = dim_of(factors.inputs[leader], factor) or 0
        even = [s.axis for s in source.layout.splits[source_dim] if s.starts is None]
        for order, axis in enumerate(even):
            placements[axis] = Shard(dim, order)
        if len(axes) == 1:
            found = _resized(call, factors, factor, axes[0], dims, dim, shape, cuts, leader)
            placements[axes[0]] = found
        else:
            for axis in axes:
                current = source.placements[axis]
                if isinstance(current, Ragged):
                    placements[axis] = Ragged(dim, current.sizes)
    return placements


def _resized(
    call: OpCall,
    factors: Factors,
    factor: int,
    axis: int,
    dims: Dims,
    dim: int,
    shape: Sequence[int],
    cuts: Cuts,
    leader: int | None = None,
) -> Placement:
    """Return the placement of a dim that one axis cuts, at the cuts of the leading input."""
    source = leader
    if source is None:
        source = next(i for i, d in enumerate(factors.inputs) if dim_of(d, factor) is not None)
    spec, source_dims = call.specs[source], factors.inputs[source]
    position = dim_of(source_dims, factor) or 0
    count = cuts.mesh_shape[axis]
    current = spec.placements[axis] if leader is not None else Shard(position)
    sizes = piece_sizes(spec.shape[position], count, current, position)
    here, there = dims[dim] or Dim(factor), source_dims[position] or Dim(factor)
    extent = factors.extent(factor)
    if extent is None:
        scaled = tuple(size * there.unit // here.unit for size in sizes)
    else:
        bounds = even_bounds(extent, count)
        if leader is not None:
            bounds = bounds_of_pieces(sizes, there.steps(extent), extent)
        scaled = sizes_between(bounds, here.steps(extent))
    even = scaled == piece_sizes(shape[dim], count, Shard(dim), dim)
    kept = isinstance(current, Ragged) and current.sizes == scaled
    if even and not kept:  # else the leader would not lie as its output
        return Shard(dim)
    return Ragged(dim, scaled)
