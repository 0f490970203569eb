"""Indices into a dim of which this rank has a part: which of them are its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...mesh.spec import DTensorSpec


@dataclass(frozen=True, slots=True)
class Span:
    """This rank's part of a dim that is indexed."""

    dim: int
    start: int
    count: int
    size: int
    """Size of the whole dim."""

    @property
    def nowhere(self) -> int:
        """A local index that is out of range, also of the one element that stands for none."""
        return max(self.size, 1)

    def find(self, index: Tensor, *, wraps: bool = False) -> tuple[Tensor, Tensor]:
        """Return local indices and a mask of those that lie here.

        An index that lies elsewhere becomes 0. One that lies in no part of the dim stays out of
        range, so that the operator refuses it. ``wraps`` says that negative ones count from the
        end.
        """
        if wraps:
            index = torch.where(index < 0, index + self.size, index)
        inside = (index >= self.start) & (index < self.start + self.count)
        elsewhere = ~inside & (index >= 0) & (index < self.size)
        return torch.where(
            elsewhere, 0, torch.where(inside, index - self.start, self.nowhere)
        ), inside

    def keep(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the indices that lie here or nowhere, and their local indices."""
        located, inside = self.find(index)
        places = (inside | (located == self.nowhere)).nonzero().flatten()
        return places, located[places]


def span_of(spec: DTensorSpec, dim: int) -> Span | None:
    """Return this rank's part of a dim, or None where every rank has all of it."""
    if spec.box is None or not spec.ndim or not spec.layout.splits[dim]:
        return None
    return Span(dim, spec.box.offsets[dim], spec.box.sizes[dim], spec.shape[dim])


def never_empty(tensor: Tensor, spans: list[Span]) -> Tensor:
    """Return a tensor that has at least one element along the dims of ``spans``, to be picked."""
    if all(span.count for span in spans):
        return tensor
    empty = {span.dim for span in spans if not span.count}
    return tensor.new_zeros([1 if dim in empty else n for dim, n in enumerate(tensor.shape)])
