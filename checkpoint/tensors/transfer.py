"""Bytes out of and elements into torch tensors, wherever they live and however they are strided."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ...storage.arena import ARENA_UNIT, prefer_huge_pages
from .dtypes import items_of
from .sink import Array

_HUGE_BYTES = 2 * ARENA_UNIT
"""Smaller tensors have few pages of either kind, and often memory that was used before."""
_ITEMS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,  # torch has no ints as wide; elements are moved, never computed with
}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The bytes of a tensor in row-major order; only its own elements, never its whole storage."""

    tensor: torch.Tensor

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes; a contiguous CPU tensor is not copied."""
        tensor = self.tensor
        if tensor.numel() == 0:
            return
        if _is_plain_memory(tensor) and tensor.is_contiguous():
            view = _host_memory(tensor.data_ptr(), tensor.nbytes)
            if len(view) <= max_bytes:
                yield view
                return
            for start in range(0, len(view), max_bytes):
                yield view[start : start + max_bytes]
            return
        for box in Box.whole(tuple(tensor.shape)).parts(max_bytes // tensor.element_size()):
            part = tensor[box.slices].resolve_conj().resolve_neg()
            yield _bytes_of(_on_host(part).contiguous())


class TensorComparison:
    """Compares loaded elements with a tensor that has been filled already."""

    is_memory = False

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self._tensor = tensor.detach()
        self._stream = _stream_of(tensor)

    def memory(self) -> None:
        """Return None: the elements are compared, not stored."""

    def put(self, part: Box, items: Array) -> None:
        """Raise LayoutMismatch unless ``part`` of the tensor has these elements."""
        with _on(self._stream):
            filled = self._tensor[part.slices].resolve_conj().resolve_neg().to("cpu").contiguous()
        if not np.array_equal(_items_of(filled), items):
            raise LayoutMismatch(
                f"tensor {self._name!r} shares its memory with another one in the state that is "
                "loaded, but the checkpoint holds different values for the two; nothing was "
                "loaded. Untie them"
            )


class TensorSink:
    """Stores loaded elements into a tensor of the wanted box's sizes.

    Copies to a GPU run beside the reading, in the order of the stream that was current when the
    sink was made, so that what is launched there afterwards finds the elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._stream = _stream_of(tensor)
        self.is_memory = tensor.is_contiguous() and _is_plain_memory(tensor)
        """Whether this is a contiguous CPU tensor."""
        self._items: Array | None = None

    def memory(self) -> memoryview | None:
        """Return the bytes of a contiguous CPU tensor.

        A new view each time: those of ten thousand tensors, kept, would let the garbage collector
        look through all objects of the job while it is read.
        """
        tensor = self._tensor
        return _host_memory(tensor.data_ptr(), tensor.nbytes) if self.is_memory else None

    def put(self, part: Box, items: Array) -> None:
        """Store ``items`` at ``part``; parts of several threads do not overlap."""
        if self._items is None and _is_plain_memory(self._tensor):
            self._items = _items_of(self._tensor.detach())
        if self._items is not None:
            self._items[part.slices] = items
            return
        tensor = self._tensor.detach()
        with _on(self._stream):
            target = tensor[part.slices]
            if self._stream is None:
                target.copy_(_host_copy(items, tensor.dtype, pinned=False))
            else:
                _copy_in_background(target, items, self._stream)


class SinkToCome:
    """Stands for the sink of a tensor that gets its memory once the load is certain to fit."""

    _sink: TensorSink

    def __init__(self, *, is_memory: bool) -> None:
        self.is_memory = is_memory

    def arrive(self, tensor: torch.Tensor) -> None:
        """Make the sink of the tensor that has memory now, before anything is read for it."""
        self._sink = TensorSink(tensor)

    def memory(self) -> memoryview | None:
        """Return that of the sink which was made."""
        return self._sink.memory()

    def put(self, part: Box, items: Array) -> None:
        """Hand elements to the sink which was made."""
        self._sink.put(part, items)


class _Pending(threading.local):
    """The last copy to a GPU that a thread has launched."""

    event: torch.cuda.Event | None = None


_pending = _Pending()


def _copy_in_background(target: torch.Tensor, items: Array, stream: torch.cuda.Stream) -> None:
    """Launch a copy out of pinned memory, of which torch keeps a pool that is reused.

    A thread has at most two buffers in use: it fills one while the other is copied.
    """
    host = _host_copy(items, target.dtype, pinned=True)
    if _pending.event is not None:
        _pending.event.synchronize()
    target.copy_(host, non_blocking=True)
    _pending.event = torch.cuda.Event()
    _pending.event.record(stream)


def _host_copy(items: Array, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    moved = _ITEMS[items.itemsize]
    host = torch.empty(items.shape, dtype=moved, device="cpu", pin_memory=pinned)
    _items_of(host)[...] = items
    return host.view(dtype)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, after asking for huge pages if it is large and of the host.

    The system gives memory when it is first written to, a page at a time: with small ones that
    takes several times longer than to read what goes there.
    """
    if tensor.is_cpu and tensor.nbytes >= _HUGE_BYTES:
        prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _stream_of(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """Return the stream on which the caller expects work with a tensor; None off GPUs."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _host_memory(address: int, num_bytes: int) -> memoryview:
    """Return a view of memory that the caller keeps alive.

    Many times cheaper than a NumPy view of a tensor, which matters for ten thousands of small ones.
    """
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory: from a GPU by way of torch's pool of pinned memory."""
    if not tensor.is_cuda:
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _items_of(tensor: torch.Tensor) -> Array:
    """Return a view of the elements as ``DType.items``; strides are kept."""
    size = tensor.element_size()
    return tensor.view(_ITEMS[size]).numpy().view(items_of(size))
