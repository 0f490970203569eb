"""Elements as numbers, without torch: of the types that numpy does not know, too."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..tensors.dtypes import DType
from ..tensors.sink import Array

_OWN = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4")
"""Codes of types that numpy has no name for."""


def numpy_name(dtype: DType) -> str | None:
    """Return numpy's name of an element type, None if it has none."""
    return None if dtype.code in _OWN else dtype.torch_name


def numbers(dtype: DType, items: Array) -> Array:
    """Return the values of elements, given as ``DType.items``.

    Types of torch alone become float32, which holds all of their values. A packed type has more
    values in its last dim than there are elements.

    >>> from dtckpt.checkpoint.tensors.dtypes import DTYPES
    >>> numbers(DTYPES["BF16"], np.array([0x3F80, 0xC000], dtype=np.uint16)).tolist()
    [1.0, -2.0]
    >>> numbers(DTYPES["F4"], np.array([0xA5], dtype=np.uint8)).tolist()
    [3.0, -1.0]
    """
    if dtype.code == "BF16":
        return (items.astype(np.uint32) << 16).view(np.float32)
    if dtype.code == "BOOL":
        return items != 0
    if dtype.code not in _OWN:
        return items.view(dtype.torch_name)
    if dtype.packed == 1:
        return _table(dtype.code)[items]
    halves = np.stack([items & 15, items >> 4], axis=-1)  # the lower four bits are the first value
    shape = (*items.shape[:-1], items.shape[-1] * 2) if items.ndim else (2,)
    return _table(dtype.code)[halves.reshape(shape)]


@cache
def _table(code: str) -> Array:
    """Return the values of all codes of a small type."""
    if code == "F8_E8M0":  # a power of two and nothing else
        return _with_nan(np.ldexp(1.0, np.arange(256) - 127), 255)
    if code == "F8_E5M2":  # the upper half of a float16
        with np.errstate(invalid="ignore"):  # of signalling NaN
            return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    if code == "F8_E4M3":
        return _with_nan(_small_floats(4, 3, bias=7), 0x7F, 0xFF)
    if code == "F8_E4M3FNUZ":
        return _with_nan(_small_floats(4, 3, bias=8), 0x80)
    if code == "F8_E5M2FNUZ":
        return _with_nan(_small_floats(5, 2, bias=16), 0x80)
    return _small_floats(2, 1, bias=1).astype(np.float32)


def _small_floats(exponent_bits: int, mantissa_bits: int, *, bias: int) -> Array:
    """Return the values of all codes of sign, exponent and mantissa; none is special."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissas = codes & ((1 << mantissa_bits) - 1)
    exponents = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissas = mantissas + np.where(exponents > 0, 1 << mantissa_bits, 0)
    sizes = np.ldexp(mantissas.astype(float), np.maximum(exponents, 1) - bias - mantissa_bits)
    return np.where(codes >> (exponent_bits + mantissa_bits), -sizes, sizes)


def _with_nan(values: Array, *codes: int) -> Array:
    values[list(codes)] = np.nan
    return values.astype(np.float32)
