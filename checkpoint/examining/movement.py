"""How far the weights of a run move from one checkpoint to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...storage.base import Store
from ..formats.opening import read_manifest, stored_data
from .comparing import Comparison, compare
from .drift import Drift, Sum
from .statistics import tensor_statistics

_NUMBERS = ("float", "bfloat", "complex")


@dataclass(frozen=True, slots=True)
class Moved:
    """How far some tensors have moved."""

    squared_difference: Sum
    square: Sum
    """Of all that was there, unchanged tensors included."""

    has_odd: bool = False
    """Whether there are NaN or infinities in what has changed, as it is now."""

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.squared_difference + other.squared_difference,
            self.square + other.square,
            self.has_odd or other.has_odd,
        )

    @property
    def relative(self) -> float:
        """The length of the difference over the length of what was there; inf where that is zero.

        >>> Moved(Sum(1), Sum(16)).relative
        0.25
        """
        if self.squared_difference == 0:
            return 0.0
        if self.square == 0:
            return math.inf
        return float(np.sqrt(self.squared_difference / self.square))


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """How far the weights that two checkpoints have in common have moved from one to the other.

    Weights are tensors of real and complex numbers: integers count, and do not move.
    """

    moved: Mapping[str, Moved]
    """By name in the first checkpoint; differences and squares are of values that are finite in
    both."""
    drifts: Mapping[str, Drift]
    """Of those that were compared by their values: the others are the same by their checksums."""
    num_apart: int
    """Tensors that are in one checkpoint alone, or have another shape there."""
    squares: Mapping[str, Sum]
    """Of the tensors in the second checkpoint, by their names there."""


def movement(
    before: Store,
    after: Store,
    known: Mapping[str, Sum] | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Movement:
    """Return how far weights have moved from one checkpoint to another; both are read, by parts.

    ``known`` has the squares of tensors in ``before``, as the movement up to there has them:
    tensors that are the same by their checksums are read only where it does not. Raises what
    ``compare`` does.
    """
    found = compare(before, after, on_progress=on_progress)
    weights = [t for t in found.tensors.values() if t.dtypes[0].startswith(_NUMBERS)]
    squares = dict(known or {})
    unknown = [t.name for t in weights if t.by == "checksums" and t.name not in squares]
    squares |= _squares(before, unknown)
    moved: dict[str, Moved] = {}
    squares_after: dict[str, Sum] = {}
    for tensor in weights:
        if tensor.drift is not None:
            drift = tensor.drift
            is_odd = bool(drift.num_nan[1] or drift.num_inf[1])
            moved[tensor.name] = Moved(drift.squared_difference, drift.squares[0], is_odd)
            squares_after[tensor.other_name] = drift.squares[1]
        elif tensor.by == "checksums":
            moved[tensor.name] = Moved(Sum(0), squares[tensor.name])
            squares_after[tensor.other_name] = squares[tensor.name]
    return Movement(
        moved=moved,
        drifts={t.name: t.drift for t in weights if t.drift is not None},
        num_apart=_num_apart(found),
        squares=squares_after,
    )


def _num_apart(found: Comparison) -> int:
    return sum(map(len, found.only)) + sum(t.by == "nothing" for t in found.tensors.values())


def _squares(store: Store, names: list[str]) -> dict[str, Sum]:
    """Return the sums of the squares of the finite values of some tensors."""
    if not names:
        return {}
    manifest = read_manifest(store)
    tensors = {name: manifest.tensors[name] for name in names}
    found = tensor_statistics(stored_data(store, manifest), tensors)
    squares: dict[str, Sum] = {}
    for name, item in found.items():
        num = item.num_values - item.num_nan - item.num_posinf - item.num_neginf
        squares[name] = num * (Sum(item.mean or 0) ** 2 + Sum(item.std or 0) ** 2)
    return squares
