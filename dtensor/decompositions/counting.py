"""Histograms, whose bounds are those of all values, and counts of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import Partial, Placement, Replicate
from ..mesh.spec import spec_of
from .pieces import cut_axes, dims_of, on_locals, reduced, spec_of_dtensor
from .table import decomposition
from .whole import local_whole

aten = torch.ops.aten


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
    low_high = _bounds(values) if range is None else tuple(range)

    def count(local: Tensor, weight: Tensor | None = None) -> Sequence[Tensor]:
        return torch.histogram(local, bins, range=low_high, weight=weight)

    return _histogram(values, weight, count, bins, density=density)


@decomposition(aten.histogram.bins_tensor)
def histogram_between(
    values: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> Any:
    """Return a histogram between given edges, and the edges."""
    edges = local_whole(aten.histogram.bins_tensor, bins)

    def count(local: Tensor, weight: Tensor | None = None) -> Sequence[Tensor]:
        return torch.histogram(local, edges, weight=weight)

    return _histogram(values, weight, count, edges.numel() - 1, density=density)


def _histogram(
    values: Tensor,
    weight: Tensor | None,
    count: Callable[..., Sequence[Tensor]],
    bins: int,
    *,
    density: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the histograms of the parts."""
    source = reduced(values)
    own = spec_of_dtensor(source)
    inputs = [source] if weight is None else [source, _like(weight, own.placements)]
    sums = [Partial() if p.is_shard() else p for p in own.placements]
    whole = (Replicate(),) * own.mesh.ndim
    outputs = [
        spec_of(own.mesh, sums, [bins], None, own.dtype),
        spec_of(own.mesh, whole, [bins + 1], None, own.dtype),
    ]
    counts, edges = on_locals(count, inputs, outputs)
    if density:
        counts = reduced(counts)
        return counts / counts.sum() / (edges[1:] - edges[:-1]), edges
    return counts, edges


@decomposition(aten.bincount.default)
def bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Return how often each number occurs: the counts of the parts add up."""
    source = reduced(values)
    low, high = _bounds(source)
    if low < 0 or source.ndim != 1:
        raise RuntimeError("bincount: expected a tensor of one dim without negative numbers")
    own = spec_of_dtensor(source)
    size = max(minlength, int(high) + 1 if source.numel() else 0)
    dtype = torch.int64
    inputs: list[Tensor] = [source]
    if weights is not None:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        inputs.append(_like(weights, own.placements))
    cut = cut_axes(source, (0,))
    placements = [Partial() if a in cut else p for a, p in enumerate(own.placements)]

    def count(local: Tensor, weights: Tensor | None = None) -> list[Tensor]:
        return [torch.bincount(local, weights, size).to(dtype)]  # nothing counts as int64

    return on_locals(count, inputs, [spec_of(own.mesh, placements, [size], None, dtype)])[0]


def _like(tensor: Tensor, placements: tuple[Placement, ...]) -> Tensor:
    whole: Any = tensor
    return whole.redistribute(placements=placements)


@decomposition(aten.allclose.default)
def allclose(
    tensor: Tensor,
    other: Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    """Return whether all elements are close, on every rank."""
    return bool(torch.isclose(tensor, other, rtol, atol, equal_nan).all().item())
