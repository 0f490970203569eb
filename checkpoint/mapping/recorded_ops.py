"""Operators that only move elements, as they are recorded: by their names in torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ..copies.copies import MOST_COPIES, Copy, box_copy
from ..copies.meeting import through

_ops = torch.ops.aten


class Recorder(Protocol):
    """What operators need of the recorder; inner tensors are views on the meta device."""

    def inner(self, tensor: Tensor, *, is_read: bool = True) -> Tensor:
        """Return the view of a memory that a tensor is."""
        ...

    def is_target(self, tensor: Tensor) -> bool:
        """Whether a tensor is to be filled."""
        ...

    def read(self, inner: Tensor) -> Iterable[Copy]:
        """Return the copies into a contiguous tensor of the shape of a view."""
        ...

    def write(self, inner: Tensor, copies: Iterable[Copy]) -> None:
        """Take copies into a view, as those into a contiguous tensor."""
        ...

    def made(self, like: Tensor, copies: Iterable[Copy]) -> Tensor:
        """Return a new tensor that is made of copies."""
        ...


def _copy(rec: Recorder, target: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    into, of = rec.inner(target, is_read=False), rec.inner(source)
    if into.dtype != of.dtype and not rec.is_target(target):
        raise LayoutMismatch(f"it converts {of.dtype} to {into.dtype}")
    rec.write(into, rec.read(of.expand(into.shape)))
    return target


def _fill(rec: Recorder, target: Tensor, value: Any = 0) -> Tensor:
    if isinstance(value, Tensor) or value != 0:
        raise LayoutMismatch("a table has no values but those of the checkpoint, and zeros")
    into = rec.inner(target, is_read=False)
    rec.write(into, _zeros(tuple(into.shape)))
    return target


def _clone(rec: Recorder, source: Tensor, *, memory_format: Any = None) -> Tensor:
    of = rec.inner(source)
    return rec.made(_ops.clone(of, memory_format=memory_format), rec.read(of))


def _to_copy(rec: Recorder, source: Tensor, *, dtype: Any = None, **kwargs: Any) -> Tensor:
    of = rec.inner(source)
    if dtype not in (None, of.dtype):
        raise LayoutMismatch(
            f"it converts {of.dtype} to {dtype}; leave that to dtype_policy= of the load"
        )
    return rec.made(_ops.clone(of, memory_format=kwargs.get("memory_format")), rec.read(of))


def _cat(rec: Recorder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [rec.inner(tensor) for tensor in tensors]
    _check_dtypes(parts)
    out = _ops.cat(parts, dim)
    parts = [part for part in parts if part.shape != (0,) or out.dim() == 1]
    starts = itertools.accumulate((part.shape[dim] for part in parts), initial=0)
    return rec.made(out, _put_together(rec, out, dim, zip(starts, parts, strict=False)))


def _stack(rec: Recorder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [rec.inner(tensor) for tensor in tensors]
    _check_dtypes(parts)
    out = _ops.stack(parts, dim)
    rows = [part.unsqueeze(dim % out.dim()) for part in parts]
    return rec.made(out, _put_together(rec, out, dim, enumerate(rows)))


def _index_select(rec: Recorder, source: Tensor, dim: int, index: Tensor) -> Tensor:
    return _rows(rec, rec.inner(source), dim, _positions(index, source.shape[dim]))


def _index(rec: Recorder, source: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    dim, positions = _one_index(source, indices)
    return _rows(rec, rec.inner(source), dim, positions)


def _index_put(
    rec: Recorder,
    target: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    dim, positions = _one_index(target, indices)
    if accumulate:
        raise LayoutMismatch("it adds")
    into, of = rec.inner(target, is_read=False), rec.inner(values)
    shape = (*into.shape[:dim], len(positions), *into.shape[dim + 1 :])
    of = of.expand(shape)
    for at, first, count in _runs(positions):
        rec.write(into.narrow(dim, first, count), rec.read(of.narrow(dim, at, count)))
    return target


def _flip(rec: Recorder, source: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        source = _rows(rec, rec.inner(source), dim, list(range(source.shape[dim]))[::-1])
    return source


def _pad(rec: Recorder, source: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    of = rec.inner(source)
    if value != 0:
        raise LayoutMismatch(f"it pads with {value}, and a table has zeros only")
    out = _ops.constant_pad_nd(of, pad)
    made = rec.made(out, _zeros(tuple(out.shape)))
    into = rec.inner(made)
    if min(pad, default=0) < 0:
        raise LayoutMismatch("it cuts off by a negative padding")
    last_first = range(of.dim() - 1, -1, -1)  # of both ends of each dim, as torch has them
    for dim, before in zip(last_first, pad[::2], strict=False):
        into = into.narrow(dim, before, of.shape[dim])
    rec.write(into, rec.read(of))
    return made


def _repeat(rec: Recorder, source: Tensor, repeats: Sequence[int]) -> Tensor:
    of = rec.inner(source)
    out = _ops.repeat(of, repeats)
    if math.prod(repeats) > MOST_COPIES:
        raise LayoutMismatch(f"it repeats {math.prod(repeats)} times")
    of = of.view((1,) * (len(repeats) - of.dim()) + tuple(of.shape))
    copies: list[Copy] = []
    for place in itertools.product(*map(range, repeats)):
        offsets = tuple(i * size for i, size in zip(place, of.shape, strict=True))
        copies += _placed(rec, of, offsets, tuple(out.shape))
    return rec.made(out, copies)


def _empty(name: str) -> Callable[..., Tensor]:
    def make(rec: Recorder, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        of = rec.inner(source)
        out = getattr(_ops, name)(of, *args, **kwargs | {"device": "meta", "pin_memory": None})
        value = args[-1] if "full" in name else 0
        if value != 0 or "ones" in name:
            raise LayoutMismatch("a table has no values but those of the checkpoint, and zeros")
        return rec.made(out, () if "empty" in name else _zeros(tuple(out.shape)))

    return make


def _zeros(shape: tuple[int, ...]) -> list[Copy]:
    return [] if 0 in shape else [Copy.whole(None, shape)]


def _check_dtypes(parts: Sequence[Tensor]) -> None:
    if len({part.dtype for part in parts}) > 1:
        raise LayoutMismatch(f"the dtypes are {sorted({str(part.dtype) for part in parts})}")


def _put_together(
    rec: Recorder, out: Tensor, dim: int, parts: Iterable[tuple[int, Tensor]]
) -> Iterator[Copy]:
    """Yield the copies of parts that begin at some places along a dim."""
    dim %= out.dim()
    for start, part in parts:
        offsets = tuple(start if d == dim else 0 for d in range(out.dim()))
        yield from _placed(rec, part, offsets, tuple(out.shape))


def _placed(
    rec: Recorder, part: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[Copy]:
    """Yield the copies of a part that lies at some offsets in a tensor of ``shape``."""
    box = Box(offsets, tuple(part.shape))
    if not box.is_empty:
        yield from through(box_copy("", box, shape).inverse(), rec.read(part))


def _rows(rec: Recorder, of: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """Return a new tensor of some rows along a dim."""
    dim %= of.dim()
    shape = (*of.shape[:dim], len(positions), *of.shape[dim + 1 :])
    out = torch.empty(shape, dtype=of.dtype, device="meta")
    parts = ((at, of.narrow(dim, first, count)) for at, first, count in _runs(positions))
    return rec.made(out, _put_together(rec, out, dim, parts))


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield where every run of neighbours begins in a list, its first position and its length.

    >>> list(_runs([4, 5, 0]))
    [(0, 4, 2), (2, 0, 1)]
    """
    at = 0
    while at < len(positions):
        count = 1
        while at + count < len(positions) and positions[at + count] == positions[at] + count:
            count += 1
        yield at, positions[at], count
        at += count


def _one_index(tensor: Tensor, indices: Sequence[Tensor | None]) -> tuple[int, list[int]]:
    """Return the one dim that is indexed by a list or a mask, and the positions."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dim() != 1:
        raise LayoutMismatch("it takes more than one list or mask of one dim")
    dim, index = given[0]
    return dim, _positions(index, tensor.shape[dim])


def _positions(index: Tensor, size: int) -> list[int]:
    if index.is_meta or type(index) is not Tensor:
        raise LayoutMismatch("the index depends on the checkpoint")
    if index.dtype == torch.bool:
        index = index.nonzero().reshape(-1)
    return [int(position) % size for position in index.tolist()]


OPERATORS: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "zero_": _fill,
    "fill_": _fill,
    "clone": _clone,
    "_to_copy": _to_copy,
    "cat": _cat,
    "stack": _stack,
    "index_select": _index_select,
    "index": _index,
    "index_put_": _index_put,
    "flip": _flip,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
} | {
    name: _empty(name)
    for name in ("new_zeros", "zeros_like", "new_empty", "empty_like", "new_full", "full_like")
}
"""How calls are recorded, by the name of the operator."""
