"""What can be said of some values, and of others beside them, without seeing any of them again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..tensors.sink import Array
from .histogram import Bins

_SAFE = range(-400, 400)
"""Exponents of floats whose squares a float of 64 bits holds."""
_Mean = np.longdouble
"""Of means and squares: more bits and a wider range than a float of 64 bits, where there are."""
_ZERO = _Mean(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Counts of special values; extremes, mean and deviation of those that are finite."""

    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0
    num_zero: int = 0
    num_finite: int = 0
    low: float = 0
    high: float = 0
    total: int = 0
    """The sum, of integers."""
    mean: _Mean = _ZERO
    squares: _Mean = _ZERO
    """Sum of the squares of what values differ from the mean."""
    bins: Bins | None = None

    @classmethod
    def of(cls, values: Array, weights: Array | None = None) -> Moments:
        """Return those of an array of one dim, each value counted as often as it weighs.

        Of complex numbers those of their absolute values.
        """
        if values.dtype.kind == "c":
            values = np.hypot(values.real, values.imag, dtype=np.float64)
        if values.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # of signalling NaN
                wide = values.astype(np.float64, copy=False)
            return _of_floats(wide, weights)
        kind = np.uint64 if values.dtype == np.uint64 else np.int64
        return _of_ints(values.astype(kind, copy=False), weights)

    def merged(self, other: Moments) -> Moments:
        """Return those of the values of both."""
        special: dict[str, Any] = {
            "num_nan": self.num_nan + other.num_nan,
            "num_posinf": self.num_posinf + other.num_posinf,
            "num_neginf": self.num_neginf + other.num_neginf,
        }
        if self.bins is None or other.bins is None:
            return replace(other if self.bins is None else self, **special)
        low, high = min(self.low, other.low), max(self.high, other.high)
        num = self.num_finite + other.num_finite
        apart = other.mean - self.mean
        share = _Mean(other.num_finite) / num
        return Moments(
            **special,
            num_zero=self.num_zero + other.num_zero,
            num_finite=num,
            low=low,
            high=high,
            total=self.total + other.total,
            mean=self.mean + apart * share,
            squares=self.squares + other.squares + apart * apart * (self.num_finite * share),
            bins=self.bins.merged(other.bins, low, high),
        )


def _of_floats(values: Array, weights: Array | None) -> Moments:
    special: dict[str, Any] = {}
    is_finite = np.isfinite(values)
    if not is_finite.all():
        special = {
            "num_nan": _count(np.isnan(values), weights),
            "num_posinf": _count(np.isposinf(values), weights),
            "num_neginf": _count(np.isneginf(values), weights),
        }
        values = values[is_finite]
        weights = None if weights is None else weights[is_finite]
    if not values.size:
        return Moments(**special)
    low, high = float(values.min()), float(values.max())
    num = values.size if weights is None else int(weights.sum())
    wide = values
    if (largest := max(-low, high)) and math.frexp(largest)[1] not in _SAFE:
        wide = values.astype(_Mean)
    mean = (wide.sum() if weights is None else (wide * weights).sum()) / num
    apart = wide - mean
    return Moments(
        **special,
        num_zero=_count(values == 0, weights),
        num_finite=num,
        low=low,
        high=high,
        mean=_Mean(mean),
        squares=_squares(apart, weights),
        bins=Bins.of(values, low, high, weights),
    )


def _of_ints(values: Array, weights: Array | None) -> Moments:
    if not values.size:
        return Moments()
    least = values.min()
    low, high = int(least), int(values.max())
    num = values.size if weights is None else int(weights.sum())
    # What values are above the least one has no sign, and so is right though it may not fit.
    above = (values - least).view(np.uint64)
    if weights is None:
        upper, lower = above >> np.uint64(32), above & np.uint64((1 << 32) - 1)
        total = (int(upper.sum()) << 32) + int(lower.sum())
    else:
        total = int(np.dot(above, weights.astype(np.uint64)))
    apart = above.astype(np.float64) - total / num
    return Moments(
        num_zero=_count(values == 0, weights),
        num_finite=num,
        low=low,
        high=high,
        total=total + low * num,
        mean=least.astype(_Mean) + _Mean(total / num),
        squares=_squares(apart, weights),
        bins=Bins.of(values, low, high, weights),
    )


def _squares(apart: Array, weights: Array | None) -> _Mean:
    """Return the sum of squares; not by BLAS, whose threads would fight with those that read."""
    squares = np.square(apart)
    return _Mean(squares.sum() if weights is None else (squares * weights).sum())


def _count(which: Array, weights: Array | None) -> int:
    return int(np.count_nonzero(which) if weights is None else weights[which].sum())
