"""Bytes out of and elements into torch tensors, wherever they live and however they are strided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtckpt.errors import LayoutMismatch

from ..dtensor.box import Box

Array = np.ndarray[Any, Any]

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
            view = _bytes_of(tensor)
            for start in range(0, len(view), max_bytes):
                yield view[start : start + max_bytes]
            return
        for box in Box.whole(tuple(tensor.shape)).parts(max_bytes // tensor.element_size()):
            part = tensor[box.slices].resolve_conj().resolve_neg()
            yield _bytes_of(part.to("cpu").contiguous())


class TensorComparison:
    """Compares loaded elements with a tensor that has been filled already."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self._tensor = tensor.detach()

    def put(self, part: Box, items: Array) -> None:
        """Raise LayoutMismatch unless ``part`` of the tensor has these elements."""
        filled = self._tensor[part.slices].resolve_conj().resolve_neg().to("cpu").contiguous()
        if not np.array_equal(_items_of(filled), items):
            raise LayoutMismatch(
                f"tensor {self._name!r} shares its memory with another one in the state that is "
                "loaded, but the checkpoint holds different values for the two. Untie them"
            )


class TensorSink:
    """Stores loaded elements into a tensor of the wanted box's sizes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._items = _items_of(self._tensor) if _is_plain_memory(self._tensor) else None

    def put(self, part: Box, items: Array) -> None:
        """Store ``items`` at ``part``; parts of several threads do not overlap."""
        if self._items is not None:
            self._items[part.slices] = items
            return
        host = torch.from_numpy(np.array(items).view(f"i{items.itemsize}"))
        self._tensor[part.slices].copy_(host.view(self._tensor.dtype))


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _items_of(tensor: torch.Tensor) -> Array:
    """Return a view of the elements as unsigned ints; strides are kept."""
    size = tensor.element_size()
    return tensor.view(_INT_OF_SIZE[size]).numpy().view(f"u{size}")
