"""Loading into another dtype than the one that was saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from dtckpt.errors import LayoutMismatch

from ...dtensor.comm.caches import remembered
from ...dtensor.geometry.box import Box
from ..tensors.dtypes import DType, items_of, torch_items
from ..tensors.sink import Array, Sink

DTypePolicy = Literal["error", "widen", "cast"]
POLICIES: tuple[DTypePolicy, ...] = ("error", "widen", "cast")

CONVERTED_BYTES = 2 << 20
"""Most bytes that are converted at once, of the wider dtype: several threads do so at a time."""


@dataclass(frozen=True, slots=True)
class _Float:
    """The numbers that a floating point dtype holds."""

    precision: int
    """Bits of the significand, the hidden one included."""
    low: int
    """Exponent of the smallest positive number."""
    high: int
    """Exponent of the largest number."""


@dataclass(frozen=True, slots=True)
class _Int:
    bits: int
    """Bits of the magnitude."""
    signed: bool


_NUMBERS: dict[str, _Float | _Int] = {
    "float64": _Float(53, -1074, 1023),
    "float32": _Float(24, -149, 127),
    "float16": _Float(11, -24, 15),
    "bfloat16": _Float(8, -133, 127),
    "float8_e4m3fn": _Float(4, -9, 8),
    "float8_e5m2": _Float(3, -16, 15),
    "float8_e4m3fnuz": _Float(4, -10, 7),
    "float8_e5m2fnuz": _Float(3, -17, 15),
    "float8_e8m0fnu": _Float(1, -127, 127),
    "int64": _Int(63, signed=True),
    "int32": _Int(31, signed=True),
    "int16": _Int(15, signed=True),
    "int8": _Int(7, signed=True),
    "uint64": _Int(64, signed=False),
    "uint32": _Int(32, signed=False),
    "uint16": _Int(16, signed=False),
    "uint8": _Int(8, signed=False),
    "bool": _Int(1, signed=False),
}
_WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Those that hold infinities, not-a-number and both zeros; narrower ones lack some of them."""


def is_lossless(saved: str, wanted: str) -> bool:
    """Whether every value of one dtype is a value of the other; both by their torch names.

    >>> [is_lossless("bfloat16", wanted) for wanted in ("float32", "float16")]
    [True, False]
    >>> [is_lossless("int32", wanted) for wanted in ("int64", "float64", "float32", "uint64")]
    [True, True, False, False]
    """
    if (saved, wanted) == ("complex64", "complex128"):
        return True
    have, want = _NUMBERS.get(saved), _NUMBERS.get(wanted)
    if isinstance(have, _Int) and isinstance(want, _Int):
        return have.bits <= want.bits and (want.signed or not have.signed) and wanted != "bool"
    if not isinstance(want, _Float) or wanted not in _WIDE_FLOATS:
        return False
    if isinstance(have, _Int):
        return have.bits <= want.precision
    return (
        isinstance(have, _Float)
        and have.precision <= want.precision
        and have.low >= want.low
        and have.high <= want.high
    )


def check_policy(policy: str) -> None:
    """Raise LayoutMismatch unless ``policy`` is one."""
    if policy not in POLICIES:
        raise LayoutMismatch(f"dtype_policy={policy!r}: expected one of {', '.join(POLICIES)}")


def may_convert(policy: DTypePolicy, saved: DType, wanted: DType) -> bool:
    """Whether a policy lets tensors of one dtype be loaded into another."""
    if saved == wanted:
        return True
    if policy == "widen":
        return is_lossless(saved.torch_name, wanted.torch_name)
    return policy == "cast" and _can_convert(torch_dtype(saved), torch_dtype(wanted))


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's name for an element type of the format."""
    return getattr(torch, dtype.torch_name)


@remembered(1024)
def _can_convert(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch has the conversion at all; some packed dtypes have none."""
    bits = torch.zeros(16, dtype=torch.uint8, device="cpu")
    try:
        bits.view(saved).to(wanted)
    except RuntimeError:
        return False
    return True


class ConvertingSink:
    """Converts loaded elements, a piece at a time, and hands them on."""

    is_memory = False

    def __init__(self, sink: Sink, saved: DType, wanted: DType) -> None:
        self._sink = sink
        self._saved = torch_dtype(saved)
        self._wanted = torch_dtype(wanted)

    def memory(self) -> None:
        """Return None: the bytes that were saved are not those that are wanted."""

    def put(self, part: Box, items: Array) -> None:
        """Convert ``items`` by the rules of ``Tensor.to`` and store them at ``part``."""
        widest = max(self._saved.itemsize, self._wanted.itemsize)
        for box in Box.whole(part.sizes).parts(CONVERTED_BYTES // widest):
            made = converted(items[box.slices], self._saved, self._wanted)
            self._sink.put(box.translate(part.offsets), made)


def converted(items: Array, saved: torch.dtype, wanted: torch.dtype) -> Array:
    """Return elements of another dtype by the rules of ``Tensor.to``, as ``DType.items``."""
    host = torch.from_numpy(np.array(items).view(torch_items(items.itemsize)))
    made = host.view(saved).to(wanted)
    as_bytes = made.reshape(-1).view(torch.uint8).numpy()
    return as_bytes.view(items_of(made.itemsize)).reshape(items.shape)
