"""What is in the memory of recording tensors: the copies that a loader has made into it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import row_major_strides
from ..copies.copies import Copy, Loop, joined, simplified
from ..copies.meeting import through, without


@dataclass(slots=True, eq=False)
class Memory:
    """A piece of memory, by a tensor without any, and where its elements come from.

    Copies count the elements of the memory itself, so views of it need nothing of their own.
    """

    base: torch.Tensor
    """One-dimensional and on the meta device."""
    copies: list[Copy] = field(default_factory=list[Copy])

    @classmethod
    def of(cls, numel: int, dtype: torch.dtype) -> Memory:
        """Return memory in which nothing is."""
        return cls(torch.empty(numel, dtype=dtype, device="meta"))

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor that lies here as another one lies in its own memory."""
        return self.base.as_strided(like.size(), like.stride(), like.storage_offset())

    def read(self, view: torch.Tensor) -> Iterator[Copy]:
        """Yield the copies into a contiguous tensor of the shape of a view."""
        if view.numel():
            yield from through(_lying(view), self.copies)

    def write(self, view: torch.Tensor, copies: Iterable[Copy]) -> None:
        """Take copies into a view, as those into a contiguous tensor of its shape."""
        if not view.numel():
            return
        lying = _lying(view)
        if any(loop.of == 0 for loop in lying.loops):
            raise LayoutMismatch("elements of it are the same memory")
        into = lying.inverse()
        kept = [rest for copy in self.copies for rest in without(copy, into)]
        self.copies = [*joined([*kept, *through(into, copies)])]

    def zero(self, view: torch.Tensor) -> None:
        """Take zeros into a view."""
        self.write(view, [Copy.whole(None, tuple(view.shape))] if view.numel() else [])


def _lying(view: torch.Tensor) -> Copy:
    """Return the copy of a view, out of its memory, into a contiguous tensor of its shape."""
    steps = zip(view.shape, row_major_strides(tuple(view.shape)), view.stride(), strict=True)
    loops = tuple(Loop(int(size), to, int(of)) for size, to, of in steps)
    return simplified(Copy(source="", source_start=int(view.storage_offset()), loops=loops))


def numel_of(tensor: torch.Tensor) -> int:
    """Return how many elements of a tensor's dtype its memory has, up to its last one."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1) if math.prod(tensor.shape) else 0
