"""Strict reading of integers from JSON and from users."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, cast

from dtckpt.errors import PlacementError, UnsupportedOp


def ints(values: object, what: str) -> tuple[int, ...]:
    """Return a tuple of ints; PlacementError, naming ``what``, for anything that is not one.

    >>> ints([2, 3], "shape")
    (2, 3)
    """
    if type(values) is tuple and all(type(value) is int for value in cast(Any, values)):
        return cast(tuple[int, ...], values)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PlacementError(f"{what} must be a sequence of ints, got {values!r}")
    try:
        return tuple(_int(value) for value in cast(Iterable[Any], values))
    except TypeError as error:
        raise PlacementError(f"{what} must be a sequence of ints, got {values!r}") from error


def integer(value: object, what: str) -> int:
    """Return an int; PlacementError, naming ``what``, for anything that is not one.

    >>> integer(2, "the dim of a Shard")
    2
    """
    try:
        return _int(value)
    except TypeError as error:
        if type(value).__module__.startswith("torch.fx"):
            # What compilers have in the place of numbers that vary. They record what is around a
            # NotImplementedError, and run what raises it by itself.
            raise UnsupportedOp(f"{what} must not vary within a graph") from error
        raise PlacementError(f"{what} must be an int, got {value!r}") from error


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is not an int here")
    return operator.index(value)
