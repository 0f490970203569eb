"""Histograms whose bins widen as values come, so that values are seen once.

Bins are as wide as a power of two and begin at its multiples. So two narrow ones make a wide one
exactly, and the result is the same whatever order values come in.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from ..tensors.sink import Array

NUM_BINS = 64
"""Most bins of a histogram; it has more than half of them, unless values differ by less."""
_FINEST = -1022
_MAX_INDEX_BITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many values lie where, of all that are finite."""

    edges: tuple[float, ...]
    """Where bins begin, and the end of the last one; ints for integers. Bins are equally wide. If
    all values are equal, there is one bin, of no width."""
    counts: tuple[int, ...]
    """Values in each bin: from its edge on, up to but without the next one."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of 2**exponent, of which the first begins at that times ``first``."""

    exponent: int
    first: int
    counts: Array

    @classmethod
    def of(cls, values: Array, low: float, high: float, weights: Array | None) -> Bins:
        """Return the bins of finite values from ``low`` to ``high``, some as often as weighed."""
        exponent = _exponent(low, high)
        first = _index(low, exponent)
        if isinstance(low, int):
            kind = values.dtype.type
            at = ((values >> kind(exponent)) - kind(first)).astype(np.int64)
        else:
            at = np.floor(values * math.ldexp(1.0, -exponent)).astype(np.int64)
            if exponent > 0 and low < 0:
                at[(values < 0) & (at == 0)] = -1  # where the product was too small for a float
            at -= first
        counts = np.bincount(at, weights, minlength=NUM_BINS)
        return cls(exponent, first, counts.astype(np.int64))

    def merged(self, other: Bins, low: float, high: float) -> Bins:
        """Return the bins of both, whose values are from ``low`` to ``high``."""
        exponent = _exponent(low, high)
        first = _index(low, exponent)
        return Bins(exponent, first, self._at(exponent, first) + other._at(exponent, first))

    def _at(self, exponent: int, first: int) -> Array:
        if (exponent, first) == (self.exponent, self.first):
            return self.counts
        shift = exponent - self.exponent
        counts = np.zeros(NUM_BINS, dtype=np.int64)
        for i in np.flatnonzero(self.counts).tolist():
            counts[((self.first + i) >> shift) - first] += self.counts[i]
        return counts

    def histogram(self, low: float, high: float) -> Histogram:
        """Return what is found of values from ``low`` to ``high``."""
        if low == high:
            return Histogram(edges=(low, high), counts=(int(self.counts.sum()),))
        num_bins = _index(high, self.exponent) - self.first + 1
        starts = range(self.first, self.first + num_bins + 1)
        is_int = isinstance(low, int)
        edges = (i << self.exponent if is_int else _float(i, self.exponent) for i in starts)
        return Histogram(edges=tuple(edges), counts=tuple(self.counts[:num_bins].tolist()))


def _exponent(low: float, high: float) -> int:
    """Return the exponent of the narrowest bins that are enough; of a wider range no smaller."""
    if isinstance(low, int) and isinstance(high, int):
        exponent = max((high - low).bit_length() - 7, 0)
    else:
        largest = math.frexp(max(-low, high))[1] if low or high else _FINEST
        finest = max(largest - _MAX_INDEX_BITS, _FINEST)
        half = high / 2 - low / 2  # the whole may be too much for a float
        exponent = max(math.frexp(half)[1] - 7, finest) if half else finest
    while _index(high, exponent) - _index(low, exponent) >= NUM_BINS:
        exponent += 1
    return exponent


def _index(value: float, exponent: int) -> int:
    if isinstance(value, int):
        return value >> exponent
    index = math.floor(math.ldexp(value, -exponent))
    return -1 if index == 0 and value < 0 else index


def _float(index: int, exponent: int) -> float:
    try:
        return math.ldexp(index, exponent)
    except OverflowError:
        return math.copysign(sys.float_info.max, index)
