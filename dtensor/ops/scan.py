"""Scans: sums, products and extremes of what comes before, along one dim.

The dim must be whole, or every rank scans its part and adds what comes before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..geometry.placement import Shard
from ..mesh.spec import DTensorSpec, spec_of
from ..tensor.wrapper import Wrapper
from .engine.dims import dims_of, without
from .engine.dtypes import accumulator, is_inexact
from .engine.factors import FIRST
from .engine.forms import operators
from .engine.primitives import ascending, cut_axes, on_locals, reduced, reduced_spec, replicated
from .engine.rules import alike, along_whole_dims
from .engine.table import Decomposition, OpCall, Rule, decomposition, rule

aten = torch.ops.aten


rule(*operators(aten, "_logcumsumexp cummax cummin cumprod logcumsumexp"))(along_whole_dims)


@rule(aten.cumsum.default)
def cumsum_rule(call: OpCall) -> Rule:
    """Sums along one dim, which must be whole; terms of it have sums of their own."""
    return alike(call, without(call.specs[0].ndim, call.arg("dim"))[0], linear=FIRST)


def _parts_before(own: DTensorSpec, axes: Sequence[int], dim: int) -> list[int]:
    """Return which parts lie before this rank's along ``dim``, nearest first.

    Parts are counted along ``axes``.
    """
    here, box = own.mesh.get_coordinate(), own.box
    if here is None or box is None:
        return []
    before: list[tuple[int, int]] = []
    for index, along in enumerate(itertools.product(*[range(own.mesh.shape[a]) for a in axes])):
        there = list(here)
        for axis, position in zip(axes, along, strict=True):
            there[axis] = position
        part = own.layout.box(tuple(there))
        if part.sizes[dim] and part.offsets[dim] < box.offsets[dim]:
            before.append((part.offsets[dim], index))
    return [index for _, index in sorted(before, reverse=True)]


def _scan(
    tensor: Tensor,
    dim: int,
    dtypes: Sequence[torch.dtype],
    scan: Callable[[Tensor], Sequence[Tensor]],
    join: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]],
) -> list[Tensor] | None:
    """Return a scan, or None where the mesh does not cut ``dim``.

    ``scan`` scans a part. ``join`` takes the scan of a part and the last elements, stacked, of the
    scans of all parts before it. There is one of ``dtypes`` per result.
    """
    dims = dims_of(tensor, dim)
    if not cut_axes(tensor, dims):
        return None
    source = reduced(ascending(tensor, dims))
    own, axes, (at,) = source.spec, cut_axes(source, dims), dims
    lead = math.prod(own.mesh.shape[axis] for axis in axes)
    scans = [spec_of(own.mesh, own.placements, own.shape, None, dtype) for dtype in dtypes]
    stacks = [
        reduced_spec(source, dims, Shard(0), keepdim=True, dtype=dtype, lead=lead)
        for dtype in dtypes
    ]

    def last(*scanned: Tensor) -> list[Tensor]:
        if scanned[0].shape[at] == 0:
            return [s.new_zeros(k.local_shape) for s, k in zip(scanned, stacks, strict=True)]
        return [s.narrow(at, s.shape[at] - 1, 1).unsqueeze(0) for s in scanned]

    scanned = on_locals(scan, [source], scans)
    ends = [replicated(end, axes) for end in on_locals(last, scanned, stacks)]
    before = _parts_before(own, axes, at)
    if not before:
        return [*scanned]

    def joined(*given: Tensor) -> Sequence[Tensor]:
        return join(given[: len(dtypes)], [end[before] for end in given[len(dtypes) :]])

    return [*on_locals(joined, [*scanned, *ends], scans)]


def _sums(
    scan: Callable[[Tensor, int, torch.dtype], Tensor],
    join: Callable[[Tensor, Tensor, torch.dtype], Tensor],
) -> Decomposition:
    """Return a scan whose parts are joined by their last elements alone.

    ``scan`` and ``join`` get the dtype to compute in: without it small integers would become 64-bit
    ones.
    """

    def run(tensor: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        result = dtype or (tensor.dtype if is_inexact(tensor.dtype) else torch.int64)
        wide = accumulator(result)
        if cut_axes(tensor, dims_of(tensor, dim)) and tensor.numel():
            # A dtype that the kernel does not have is refused on ranks without elements, too.
            scan(torch.ones(1, dtype=wide), 0, wide)
        found = _scan(
            tensor,
            dim,
            [wide],
            lambda local: [scan(local.to(result).to(wide), dim, wide)],
            lambda scanned, ends: [join(scanned[0], ends[0], wide)],
        )
        return NotImplemented if found is None else found[0].to(result)

    return run


def _plus(scanned: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scan with the sums of the parts before it.

    Complex numbers are added part by part: torch's addition multiplies by a complex 1, which turns
    the imaginary part of an infinite number into not-a-number. Its scan does not.
    """
    if not dtype.is_complex:
        return scanned + ends.sum(0, dtype=dtype)
    return torch.view_as_complex(torch.view_as_real(scanned) + torch.view_as_real(ends).sum(0))


decomposition(aten.cumsum.default)(
    _sums(
        lambda part, dim, dtype: torch.cumsum(part, dim, dtype=dtype),
        lambda scanned, ends, dtype: _plus(scanned, ends, dtype),
    )
)
_cumprod = _sums(
    lambda part, dim, dtype: torch.cumprod(part, dim, dtype=dtype),
    lambda scanned, ends, dtype: scanned * ends.prod(0, dtype=dtype),
)


@decomposition(aten.cumprod.default)
def cumprod(tensor: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Return products of what comes before.

    Complex ones take the dim whole: (a b) c and a (b c) differ in where infinity becomes
    not-a-number.
    """
    is_complex = (dtype or tensor.dtype).is_complex
    return NotImplemented if is_complex else _cumprod(tensor, dim, dtype=dtype)


_logcumsumexp = _sums(
    lambda part, dim, _: torch.logcumsumexp(part, dim),
    lambda scanned, ends, _: torch.logaddexp(scanned, ends.logsumexp(0)),
)


@decomposition(aten.logcumsumexp.default)
def logcumsumexp(tensor: Tensor, dim: int) -> Any:
    """Return the logarithms of sums of exponentials."""
    return _logcumsumexp(tensor, dim) if tensor.is_floating_point() else NotImplemented


def _extremes(reduce_op: str) -> Decomposition:
    """Return a scan of extremes and of their last places."""

    def run(tensor: Tensor, dim: int) -> Any:
        if tensor.is_complex():  # of which kernels have no extremes
            return NotImplemented
        dims = dims_of(tensor, dim)
        tensor = ascending(tensor, dims)
        box = cast(Wrapper, tensor).spec.box
        start = box.offsets[dims[0]] if box and dims else 0

        def scan(local: Tensor) -> list[Tensor]:
            values, places = local.cummax(dim) if reduce_op == "max" else local.cummin(dim)
            return [values, places + start]

        def join(scanned: Sequence[Tensor], ends: Sequence[Tensor]) -> list[Tensor]:
            values, places = scanned
            for end, place in zip(*ends, strict=True):
                better = values >= end if reduce_op == "max" else values <= end
                ours = (better & (end == end)) | (values != values)
                values, places = torch.where(ours, values, end), torch.where(ours, places, place)
            return [values, places]

        found = _scan(tensor, dim, [tensor.dtype, torch.int64], scan, join)
        return NotImplemented if found is None else tuple(found)

    return run


decomposition(aten.cummax.default)(_extremes("max"))

decomposition(aten.cummin.default)(_extremes("min"))
