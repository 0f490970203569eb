"""Whether the memory of destinations overlaps, within one of them or between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_MAX_WORK = 1_000_000
"""Steps for the exact answer about two strided views; beyond that they count as overlapping."""

_Span = tuple[int, int, int]
"""First byte, end, and position of a tensor."""


@dataclass(slots=True)
class Sharing:
    """What destinations share memory."""

    tied: dict[int, int] = field(default_factory=dict[int, int])
    """Positions of tensors that are the very memory of an earlier one, with its position."""
    overlapping: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Positions of tensors that share some elements only."""


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may be the same memory.

    >>> overlaps_itself(torch.zeros(3).expand(2, 3)), overlaps_itself(torch.zeros(2, 3).T)
    (True, False)
    """
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += stride * (size - 1)
    return False


def find_sharing(tensors: Sequence[torch.Tensor]) -> Sharing:
    """Return which tensors share memory; views that only interleave do not."""
    spans: dict[torch.device, list[_Span]] = {}
    for index, tensor in enumerate(tensors):
        num_bytes = tensor.nbytes
        if num_bytes == 0:
            continue
        if not tensor.is_contiguous():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            num_bytes = (1 + sum((n - 1) * s for n, s in steps)) * tensor.element_size()
        start = tensor.data_ptr()
        spans.setdefault(tensor.device, []).append((start, start + num_bytes, index))
    sharing = Sharing()
    for device, found in spans.items():
        found.sort()
        _sweep(tensors, found, sharing, told_apart=device.type == "cpu")
    return sharing


def _sweep(
    tensors: Sequence[torch.Tensor], spans: list[_Span], sharing: Sharing, *, told_apart: bool
) -> None:
    """Look at spans, by address; only those that begin before others end need a closer look."""
    latest = 0
    open_spans: list[_Span] = []
    for span in spans:
        start, end, index = span
        if start >= latest:
            open_spans = [span]
            latest = end
            continue
        open_spans = [other for other in open_spans if other[1] > start]
        latest = max(latest, end)
        tensor = tensors[index]
        first = next((o[2] for o in open_spans if _is_same(o, tensors[o[2]], start, tensor)), None)
        if first is not None:
            sharing.tied[index] = first
            continue
        if told_apart:
            sharing.overlapping += [
                (other[2], index)
                for other in open_spans
                if _share_elements(tensors[other[2]], tensor, spans=(other, span))
            ]
        open_spans.append(span)


def _is_same(span: _Span, one: torch.Tensor, start: int, other: torch.Tensor) -> bool:
    """Whether two tensors are the very same elements."""
    return (
        span[0] == start
        and one.element_size() == other.element_size()
        and one.shape == other.shape
        and all(
            s == t or n == 1
            for n, s, t in zip(one.shape, one.stride(), other.stride(), strict=True)
        )
    )


def _share_elements(one: torch.Tensor, other: torch.Tensor, *, spans: tuple[_Span, _Span]) -> bool:
    if _are_columns_apart(one, other, spans[1][0] - spans[0][0]):
        return False
    try:
        max_work: Any = _MAX_WORK  # numpy's stub knows its two special values only
        return np.shares_memory(_bytes(one), _bytes(other), max_work=max_work)
    except np.exceptions.TooHardError:
        return True


def _are_columns_apart(one: torch.Tensor, other: torch.Tensor, distance: int) -> bool:
    """Whether two views of one buffer hold different columns of it: the common case, told fast."""
    if one.stride() != other.stride() or one.dtype != other.dtype or one.ndim < 2:
        return False
    step = max(one.stride())
    size = one.element_size()
    if one.stride(0) != step or distance % size:
        return False
    rest = zip(one.stride()[1:], one.shape[1:], other.shape[1:], strict=True)
    reach, other_reach = 0, 0
    for stride, n, m in rest:
        reach += stride * (n - 1)
        other_reach += stride * (m - 1)
    offset = distance // size % step
    return reach < offset and offset + other_reach < step


def _bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return an array of the tensor's shape, strides and address; its values are not read."""
    return np.asarray(_Address(tensor))


class _Address:
    """An object by which numpy sees the memory of a tensor of any dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "version": 3,
        }
