"""Parts of messages: views of tensors, and how slices of them are packed and unpacked.

What goes from one rank to another is a message: parts one after the other, which both ends list
alike. Elements move as integers of their width, which every dtype has and every kernel copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..geometry.box import Box, run_boxes
from .collectives import to_bytes

_P = TypeVar("_P", bound="MessagePart")

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

JOINABLE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)
"""Those that every kernel copies and joins."""


_PLAIN: Any = Tensor


def has_own_operators(tensor: Tensor) -> bool:
    """Return whether a tensor is of a subclass with operators of its own, as a wrapper of others.

    Its elements do not lie in its memory. Results under way and tensors of a fake mode are none.
    """
    kind: Any = type(tensor)
    return (
        kind.__torch_dispatch__ is not _PLAIN.__torch_dispatch__
        and not hasattr(tensor, "trigger_wait")
        and not hasattr(tensor, "fake_mode")
    )


class MessagePart(Protocol):
    """Elements of a tensor that go to another rank, or come from one."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent in every dim."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        ...


class Incoming(MessagePart, Protocol):
    """A part that is received."""

    def memory(self, box: Box) -> Tensor | None:
        """Return where the elements of a box of the part go, if that is ordinary memory."""
        ...

    def put(self, box: Box, items: Tensor) -> None:
        """Take the elements of a box of the part, as integers of their width."""
        ...


@dataclass(frozen=True, slots=True)
class ViewPart:
    """A view of a tensor, sent or received."""

    tensor: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the view."""
        return tuple(self.tensor.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.tensor.element_size()

    def view(self, box: Box) -> Tensor:
        """Return a box of the view, its bytes the values."""
        return self._box(box).resolve_conj().resolve_neg()

    def memory(self, box: Box) -> Tensor | None:
        """Return a box of the view, unless its bytes are not the values."""
        view = self._box(box)
        return None if view.is_conj() or view.is_neg() else view

    def put(self, box: Box, items: Tensor) -> None:
        """Copy to a box of the view."""
        view = self._box(box)
        if view.is_conj() or view.is_neg():
            view.copy_(items.view(view.dtype))
        else:
            carried(view).copy_(items)

    def _box(self, box: Box) -> Tensor:
        return self.tensor if box.sizes == self.sizes else self.tensor[box.slices]


def slice_of(parts: Sequence[_P], number: int, rounds: int) -> Iterator[tuple[_P, Box]]:
    """Yield the boxes of a message that move in a round.

    The widest elements come first, so that all lie in a buffer where they may.
    """
    if len(parts) > 1:
        parts = sorted(parts, key=lambda part: -part.itemsize)
    if rounds == 1:
        yield from ((part, Box.whole(part.sizes)) for part in parts if 0 not in part.sizes)
        return
    total = sum(map(part_bytes, parts))
    low, high = total * number // rounds, total * (number + 1) // rounds
    end = 0
    for part in parts:
        start, end = end, end + part_bytes(part)
        if end > low and start < high:
            first = max(low - start, 0) // part.itemsize
            last = min(high - start, end - start) // part.itemsize
            for box in run_boxes(Box.whole(part.sizes), first, last):
                yield part, box


def part_bytes(part: MessagePart) -> int:
    numel = part.itemsize
    for size in part.sizes:
        numel *= size
    return numel


def num_bytes_of(boxes: Sequence[tuple[MessagePart, Box]]) -> int:
    return sum(part.itemsize * box.numel for part, box in boxes)


def _stretches(memory: Tensor, boxes: Sequence[tuple[_P, Box]]) -> Iterator[tuple[Tensor, _P, Box]]:
    """Yield the bytes of every box in a packed message."""
    at = 0
    for part, box in boxes:
        num_bytes = part.itemsize * box.numel
        yield memory[at : at + num_bytes], part, box
        at += num_bytes


def pack(
    memory: Tensor, boxes: Sequence[tuple[ViewPart, Box]], failures: list[BaseException]
) -> None:
    for stretch, part, box in _stretches(memory, boxes):
        try:
            view = part.view(box)
            if stretch.storage_offset() % part.itemsize:  # after narrower elements for others
                stretch.copy_(to_bytes(view))
            else:
                _items(stretch, part, box).copy_(carried(view))
        except BaseException as error:
            failures.append(error)


def unpack(
    memory: Tensor, boxes: Sequence[tuple[Incoming, Box]], failures: list[BaseException]
) -> None:
    for stretch, part, box in _stretches(memory, boxes):
        try:
            if stretch.storage_offset() % part.itemsize:
                stretch = stretch.clone()
            part.put(box, _items(stretch, part, box))
        except BaseException as error:
            failures.append(error)


def _items(stretch: Tensor, part: MessagePart, box: Box) -> Tensor:
    """Return bytes as integers of their width, in the shape of a box."""
    return stretch.view(_CARRIERS[part.itemsize]).view(box.sizes)


def carried(view: Tensor) -> Tensor:
    """Return elements as integers of their width, which share memory with them."""
    carrier = _CARRIERS[view.element_size()]
    return view if view.dtype == carrier else view.view(carrier)


def joinable(view: Tensor) -> Tensor:
    """Return elements in a dtype that every kernel copies and joins."""
    return view if view.dtype in JOINABLE else carried(view)
