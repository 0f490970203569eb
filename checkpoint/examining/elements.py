"""Elements of tensors as text and as plain lists, of large ones those at the edges alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ..files.stored_data import StoredData
from ..reading.parts import TensorPart
from ..tensors.sink import Array
from .numbers import numbers

_MAX_SHOWN = 1000
"""Of more elements the first and last of every dim are shown, as numpy does."""
_EDGE = 3
_MAX_NUMEL = 1 << 19
"""Most elements that are shown in full: as text each takes some 500 bytes of memory."""


def elements_text(data: StoredData, part: TensorPart, *, full: bool, width: int) -> str:
    """Return the elements as numpy shows an array, all of them if they are few or ``full``.

    Otherwise no more than what is shown is read, and verified. LayoutMismatch where a tensor is too
    large to be shown in full.
    """
    is_cut = not full and math.prod(part.shape) > _MAX_SHOWN
    array = _edges(data, part) if is_cut else all_elements(data, part)
    threshold = 0 if is_cut else array.size + 1
    return np.array2string(
        array, max_line_width=width, threshold=threshold, edgeitems=_EDGE, separator=" "
    )


def all_elements(data: StoredData, part: TensorPart) -> Array:
    """Return the values of a part; LayoutMismatch where they are very many."""
    if (numel := math.prod(part.shape)) > _MAX_NUMEL:
        raise LayoutMismatch(
            f"tensor {part.tensor.name!r}: {numel:,} elements are too many to be shown in full; "
            "choose a slice, or extract it to a file"
        )
    found = numbers(part.tensor.dtype, part.read(data))
    data.check_unchanged()
    return found


def _edges(data: StoredData, part: TensorPart) -> Array:
    """Return the first and last elements of every dim, with one in the place of those between.

    What stands for others is never shown: numpy leaves out what is between as many at the edges.
    """
    dims = [_spans(n if dim in part.kept else 1) for dim, n in enumerate(part.sizes)]
    sizes = [sum(size for _, size in dim) + len(dim) - 1 for dim in dims]
    items = np.zeros(sizes, dtype=part.tensor.dtype.items)
    for corner in itertools.product(*(enumerate(dim) for dim in dims)):
        box = Box(tuple(at for _, (at, _) in corner), tuple(size for _, (_, size) in corner))
        place = tuple(
            slice(number * (_EDGE + 1), number * (_EDGE + 1) + size) for number, (_, size) in corner
        )
        items[place] = part.read(data, box)
    data.check_unchanged()
    kept = tuple(slice(None) if dim in part.kept else 0 for dim in range(len(sizes)))
    return numbers(part.tensor.dtype, items[kept])


def _spans(size: int) -> list[tuple[int, int]]:
    """Return the first index and number of those of a dim that are shown together."""
    return [(0, size)] if size <= 2 * _EDGE else [(0, _EDGE), (size - _EDGE, _EDGE)]


def plain_list(array: Array) -> Any:
    """Return numbers as nested lists of what JSON has: what is not finite, and complex, as text."""
    if array.dtype.kind == "c":
        return _as_text(array.tolist())
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return _finite(array.tolist())
    return array.tolist()


def _as_text(value: Any) -> Any:
    return [_as_text(item) for item in value] if isinstance(value, list) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else str(value)
