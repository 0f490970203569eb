"""Histograms: counts between given bounds add up; other bounds are those of all values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..geometry.placement import Partial, Replicate
from ..mesh.spec import spec_of
from ..tensor.autograd import placed
from ..tensor.wrapper import Wrapper
from .engine.dims import all_dims, dims_of
from .engine.factors import Dims, Factors
from .engine.forms import operators
from .engine.gathered import gathered_local, on_gathered
from .engine.primitives import all_distributed, cut_axes, on_locals, reduced
from .engine.table import OpCall, Rule, decomposition, rule

aten = torch.ops.aten


@rule(aten.histc.default)
def histc_rule(call: OpCall) -> Rule:
    """Counts between given bounds add up; other bounds are those of all values."""
    low, high = call.arg("min"), call.arg("max")
    source = call.specs[0]
    dims: Dims = all_dims(source.ndim) if low != high else (None,) * source.ndim
    reduce = dict.fromkeys(range(source.ndim), "sum") if low != high else {}
    return Factors(call, (dims,), ((None,),), reduce=reduce)


def _bounds(values: Tensor) -> tuple[float, float]:
    """Return smallest and largest value; 0 where there are no values."""
    if values.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(values)
    return low.item(), high.item()


@decomposition(aten.histc.default)
def histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Return a histogram between bounds that were not given."""
    if min != max or not cut_axes(values, dims_of(values, None)):
        return NotImplemented
    low, high = _bounds(values)
    if low == high:
        low, high = low - 1, high + 1
    return aten.histc.default(values, bins, low, high)


@decomposition(aten.histogram.bin_ct)
def histogram(
    values: Tensor,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Any:
    """Return a histogram and the edges of its bins, between bounds of all values if not given."""
    values, weight = all_distributed(values, weight)
    low_high = _bounds(values) if range is None else tuple(range)
    return _histogram(values, weight, density, bins, bins=bins, range=low_high)


@decomposition(aten.histogram.bins_tensor)
def histogram_between(
    values: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> Any:
    """Return a histogram between given edges, and the edges."""
    values, bins, weight = all_distributed(values, bins, weight)
    edges = gathered_local(aten.histogram.bins_tensor, bins)
    return _histogram(values, weight, density, edges.numel() - 1, bins=edges)


def _histogram(
    values: Tensor, weight: Tensor | None, density: bool, count: int, **how: Any
) -> tuple[Tensor, Tensor]:
    """Return the sum of the histograms of the parts."""
    source = reduced(values)
    own = source.spec
    inputs = [source] if weight is None else [source, placed(cast(Wrapper, weight), own.placements)]
    sums = [Partial() if p.is_shard() else p for p in own.placements]
    whole = (Replicate(),) * own.mesh.ndim
    outputs = [
        spec_of(own.mesh, sums, [count], None, own.dtype),
        spec_of(own.mesh, whole, [count + 1], None, own.dtype),
    ]

    def counted(local: Tensor, weight: Tensor | None = None) -> Sequence[Tensor]:
        return torch.histogram(local, weight=weight, **how)

    counts, edges = on_locals(counted, inputs, outputs)
    if density:
        counts = reduced(counts)
        return counts / counts.sum() / (edges[1:] - edges[:-1]), edges
    return counts, edges


@decomposition(aten.bincount.default)
def bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Return how often each number occurs: the counts of the parts add up."""
    values, weights = all_distributed(values, weights)
    source = reduced(values)
    low, high = _bounds(source)
    if low < 0 or source.ndim != 1:
        raise RuntimeError("bincount: expected a tensor of one dim without negative numbers")
    own = source.spec
    size = max(minlength, int(high) + 1 if source.numel() else 0)
    dtype = torch.int64
    inputs: list[Tensor] = [source]
    if weights is not None:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        inputs.append(placed(cast(Wrapper, weights), own.placements))
    cut = cut_axes(source, (0,))
    placements = [Partial() if a in cut else p for a, p in enumerate(own.placements)]

    def count(local: Tensor, weights: Tensor | None = None) -> list[Tensor]:
        return [torch.bincount(local, weights, size).to(dtype)]  # nothing counts as int64

    return on_locals(count, inputs, [spec_of(own.mesh, placements, [size], None, dtype)])[0]


on_gathered(
    *operators(
        aten, "_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors"
    )
)
