"""numpy's arrays and scalars in pickles: what numpy would make of their bytes, without its code.

An array is pickled as an empty one and a state (version, shape, dtype, whether columns come first,
elements), a dtype as its code and a state that has the byte order second
(``ndarray.__reduce__`` and ``dtype.__reduce__``, https://numpy.org/doc/stable/reference/).
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np

from ...state.limits import MAX_DIMS, shown, size_of

_CODE = re.compile(r"[biufcSU][0-9]{1,9}")
_ORDERS = ("<", ">", "|", "=")


class NotHeld(Exception):
    """Why no checkpoint can hold what a pickle has."""

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind or reason
        """In short, what it is."""


class Array(NamedTuple):
    """The elements of an array, in native byte order."""

    dtype_name: str
    """Of numpy."""
    shape: tuple[int, ...]
    data: bytes
    """In row-major order."""


class ArrayDtype:
    """A dtype while it is unpickled. What a pickle gives it is looked at when it is used."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, *_: Any) -> None:
        self._code = code
        self._order = "="

    def __setstate__(self, state: Any) -> None:
        self._order = state[1]

    def made(self) -> np.dtype[Any]:
        """Return the dtype; NotHeld unless it is one of plain numbers or texts."""
        code = self._code
        if not isinstance(code, str) or not _CODE.fullmatch(code) or self._order not in _ORDERS:
            raise NotHeld(f"numpy's dtype {shown(code)}, which dtckpt does not hold")
        return np.dtype(self._order + code)


class UnfinishedArray:
    """An array while it is unpickled, which has no elements before its state is set."""

    __slots__ = ("_state",)

    def __init__(self, *_: Any) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def made(self) -> Array:
        """Return the array; ValueError, TypeError or NotHeld where it is none."""
        _, shape, dtype, is_fortran, data = self._state
        return array_of(data, dtype, shape, "F" if is_fortran else "C")


def array_of(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    """Return an array of some bytes; ValueError unless they are its elements."""
    sizes = tuple(size_of(size, "a size") for size in shape)
    made = _made(dtype)
    is_right = isinstance(data, bytes | bytearray) and len(data) == math.prod(sizes) * made.itemsize
    if not is_right or len(sizes) > MAX_DIMS or order not in ("C", "F"):
        raise ValueError(f"an array of shape {shown(sizes)} and {made} in {shown(data)}")
    elements = np.frombuffer(data, made).reshape(sizes, order=order)
    native = elements.astype(made.newbyteorder("="), order="C", copy=False)
    return Array(made.name, sizes, native.tobytes())


def scalar(dtype: Any, data: Any) -> Any:
    """Return numpy's scalar of some bytes; ValueError unless they are its own."""
    made = _made(dtype)
    if not isinstance(data, bytes | bytearray) or len(data) != made.itemsize:
        raise ValueError(f"a scalar of {made} in {shown(data)}")
    return np.frombuffer(data, made)[0] if data else made.type()


def _made(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, ArrayDtype):
        raise TypeError(f"{shown(dtype)} is no dtype of numpy")
    return dtype.made()
