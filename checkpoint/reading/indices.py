"""Indices of lazy tensors: which boxes hold the elements, and what is left to do with these."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box

if TYPE_CHECKING:
    from types import EllipsisType

    import numpy as np
    import torch

    OfOneDim = int | slice | Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | torch.Tensor
    Index = OfOneDim | EllipsisType


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an index needs of a tensor."""

    boxes: tuple[Box, ...]
    """To be read and put together along ``dim``; there may be none."""
    dim: int
    rest: tuple[Any, ...]
    """The index to apply to what has been put together."""
    sizes: tuple[int, ...]
    """Sizes of what has been put together."""


def resolve(index: Any, shape: tuple[int, ...], name: str) -> Resolved:
    """Return what an index needs: ints, slices with positive steps, one Ellipsis, one list or mask.

    A list of ints or a mask, of one dim, may be a list, an array or a tensor. IndexError, TypeError
    or LayoutMismatch, naming the tensor, for anything else.
    """
    given: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    parts = [p if p is Ellipsis or isinstance(p, slice) else _one(p, name) for p in given]
    ellipses = sum(part is Ellipsis for part in parts)
    if ellipses == 0:
        parts.append(Ellipsis)
    at = next(i for i, part in enumerate(parts) if part is Ellipsis)
    fill = len(shape) - (len(parts) - 1)
    if fill < 0 or ellipses > 1:
        raise IndexError(
            f"too many indices for tensor {name!r} of shape {shape}: {repr(index)[:200]}"
        )
    parts[at : at + 1] = [slice(None)] * fill
    offsets, sizes, rest = [0] * len(shape), list(shape), list[Any]()
    chosen: tuple[int, list[int]] | None = None
    for dim, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, int):
            offsets[dim], sizes[dim] = _position(part, size, name), 1
            rest.append(0)
        elif isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step < 0:
                raise LayoutMismatch(f"tensor {name!r}: slices need a positive step, got {part}")
            offsets[dim], sizes[dim] = start, max(stop - start, 0)
            rest.append(slice(None, None, step))
        elif chosen is not None:
            raise IndexError(f"tensor {name!r} takes one list or mask in an index, got two")
        else:
            positions = _positions(part, size, name)
            chosen = dim, sorted(set(positions))
            where = {position: i for i, position in enumerate(chosen[1])}
            rest.append([where[position] for position in positions])
    box = Box(tuple(offsets), tuple(sizes))
    if chosen is None:
        return Resolved((box,), 0, tuple(rest), box.sizes)
    dim, rows = chosen
    boxes = tuple(_with(box, dim, first, count) for first, count in _runs(rows))
    return Resolved(boxes, dim, tuple(rest), _with(box, dim, 0, len(rows)).sizes)


def _with(box: Box, dim: int, offset: int, size: int) -> Box:
    return Box(
        (*box.offsets[:dim], offset, *box.offsets[dim + 1 :]),
        (*box.sizes[:dim], size, *box.sizes[dim + 1 :]),
    )


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Return first and length of every run of neighbours.

    >>> _runs([1, 2, 5])
    [(1, 2), (5, 1)]
    """
    runs = [list(run) for _, run in groupby(enumerate(rows), key=lambda item: item[1] - item[0])]
    return [(run[0][1], len(run)) for run in runs]


def _one(part: Any, name: str) -> Any:
    """Return an int, or a one-dimensional array of ints or bools."""
    if not isinstance(part, bool):
        try:
            return operator.index(part)
        except TypeError:
            pass
    import numpy as np

    if isinstance(part, Sequence) or (hasattr(part, "__array__") and getattr(part, "ndim", 0)):
        found = np.asarray(part)
        if found.size == 0 and not isinstance(part, np.ndarray):
            found = found.astype(int)
        if found.ndim == 1 and found.dtype.kind in "iub":
            return found
    raise TypeError(
        f"tensor {name!r} takes ints, slices, ..., and one list or mask of one dim, "
        f"got {repr(part)[:200]}"
    )


def _positions(part: Any, size: int, name: str) -> list[int]:
    if part.dtype.kind != "b":
        return [_position(int(position), size, name) for position in part]
    if len(part) != size:
        raise IndexError(f"a mask of {len(part)} does not fit a dim of {size} in {name!r}")
    return [int(position) for position in part.nonzero()[0]]


def _position(index: int, size: int, name: str) -> int:
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for a dim of {size} in {name!r}")
    return index % size
