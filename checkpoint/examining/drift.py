"""How far some values are from others, and what can be said of both without seeing them again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..tensors.dtypes import DType
from ..tensors.sink import Array
from .numbers import numbers

_STEP = 1 << 15
"""Elements that are looked at at once; as numbers of 64 bits they are in a processor's cache."""

Sum = np.longdouble
"""Of a wider range than a float of 64 bits, where there is such a type: squares may need it."""
_ZERO = Sum(0)
_SAFE = 1e-280
"""Sums of squares below have lost too much of values whose squares are too small for a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Sums over pairs of values; squares, products and differences are of those that are finite."""

    num_values: int = 0
    num_changed: int = 0
    """Pairs that are not equal; NaN equals NaN."""
    num_beyond: int = 0
    """Of these the ones that differ by more than is tolerated."""
    num_odd: int = 0
    """And of these the ones of which one is NaN or infinite."""
    changed_bytes: int = 0
    """Of elements of one dtype: how many bytes differ."""
    num_nan: tuple[int, int] = (0, 0)
    num_inf: tuple[int, int] = (0, 0)
    squares: tuple[Sum, Sum] = (_ZERO, _ZERO)
    product: Sum = _ZERO
    squared_difference: Sum = _ZERO
    max_abs: float = 0.0

    def merged(self, other: Drift) -> Drift:
        """Return the sums over the pairs of both."""
        return Drift(
            num_values=self.num_values + other.num_values,
            num_changed=self.num_changed + other.num_changed,
            num_beyond=self.num_beyond + other.num_beyond,
            num_odd=self.num_odd + other.num_odd,
            changed_bytes=self.changed_bytes + other.changed_bytes,
            num_nan=_added(self.num_nan, other.num_nan),
            num_inf=_added(self.num_inf, other.num_inf),
            squares=_added(self.squares, other.squares),
            product=self.product + other.product,
            squared_difference=self.squared_difference + other.squared_difference,
            max_abs=max(self.max_abs, other.max_abs),
        )

    @property
    def relative_l2(self) -> float:
        """The length of the difference as a share of that of the first; inf where that is zero.

        >>> Drift(squares=(Sum(16), Sum(25)), squared_difference=Sum(1)).relative_l2
        0.25
        """
        if self.squared_difference == 0:
            return 0.0
        if self.squares[0] == 0:
            return math.inf
        return float(np.sqrt(self.squared_difference / self.squares[0]))

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both, None where one of them is zero."""
        lengths = np.sqrt(self.squares[0]) * np.sqrt(self.squares[1])
        return max(-1.0, min(1.0, float(self.product / lengths))) if lengths else None


def drift_of(
    dtypes: tuple[DType, DType], items: tuple[Array, Array], *, rtol: float, atol: float
) -> Drift:
    """Return what there is to say of pairs of elements, given as ``DType.items``.

    Values differ by more than is tolerated where that is above ``atol`` plus ``rtol`` times the
    size of the first.
    """
    one, other = (each.reshape(-1) for each in items)
    found = Drift()
    for start in range(0, one.size, _STEP):
        some = one[start : start + _STEP], other[start : start + _STEP]
        changed_bytes = 0
        if dtypes[0] is dtypes[1]:
            changed_bytes = int(np.count_nonzero(some[0].view(np.uint8) != some[1].view(np.uint8)))
        values = numbers(dtypes[0], some[0]), numbers(dtypes[1], some[1])
        found = found.merged(_drift(_comparable(*values), changed_bytes, rtol, atol))
    return found


def _comparable(one: Array, other: Array) -> tuple[Array, Array]:
    """Return numbers of one type that holds the values of both exactly."""
    kinds = {one.dtype.kind, other.dtype.kind}
    if "c" in kinds:
        kind: Any = np.complex128
    elif kinds & {"i", "u"} and max(one.dtype.itemsize, other.dtype.itemsize) == 8:
        kind = np.longdouble  # of 64 bits before the exponent
    else:
        kind = np.float64
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return one.reshape(-1).astype(kind), other.reshape(-1).astype(kind)


def _drift(values: tuple[Array, Array], changed_bytes: int, rtol: float, atol: float) -> Drift:
    one, other = values
    is_nan = np.isnan(one), np.isnan(other)
    is_inf = np.isinf(one), np.isinf(other)
    is_changed = _is_other(one, other)
    num_odd = 0
    if any(map(np.any, (*is_nan, *is_inf))):
        finite = np.isfinite(one) & np.isfinite(other)
        num_odd = int(np.count_nonzero(is_changed & ~finite))  # which no tolerance covers
        one, other = one[finite], other[finite]
    with np.errstate(over="ignore", invalid="ignore"):
        of = one, other, np.abs(one - other)
        squares = [_square(each) for each in of]
        if one.dtype == np.float64 and not all(map(_is_told, squares, of)):
            one, other = one.astype(Sum), other.astype(Sum)
            of = one, other, np.abs(one - other)
            squares = [_square(each) for each in of]
        apart = of[2]
        return Drift(
            num_values=is_changed.size,
            num_changed=int(np.count_nonzero(is_changed)),
            num_beyond=num_odd + int(np.count_nonzero(apart > atol + rtol * np.abs(one))),
            num_odd=num_odd,
            changed_bytes=changed_bytes,
            num_nan=(int(is_nan[0].sum()), int(is_nan[1].sum())),
            num_inf=(int(is_inf[0].sum()), int(is_inf[1].sum())),
            squares=(squares[0], squares[1]),
            product=Sum(np.real(one * np.conj(other)).sum()),
            squared_difference=squares[2],
            max_abs=float(apart.max()) if apart.size else 0.0,
        )


def _is_other(one: Array, other: Array) -> Array:
    """Return which pairs are not equal; of complex numbers each part is compared."""
    if one.dtype.kind == "c":
        return _is_other(one.real, other.real) | _is_other(one.imag, other.imag)
    return (one != other) & ~(np.isnan(one) & np.isnan(other))


def _square(values: Array) -> Sum:
    if values.dtype.kind == "c":
        values = np.abs(values)
    return Sum((values * values).sum())  # not by BLAS, which has threads of its own


def _is_told(square: Sum, values: Array) -> bool:
    """Whether a float of 64 bits held the squares of values."""
    return bool(_SAFE < square < math.inf or not values.any())


def _added(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return one[0] + other[0], one[1] + other[1]
