"""Plain tensors with a layout beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...dtensor.geometry.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """What one rank holds of a tensor with a layout, in a plain tensor: saved and loaded as such.

    ``load`` fills ``tensor`` itself.
    """

    tensor: torch.Tensor
    """The local elements, of the shape that the layout gives this rank."""
    layout: Layout
    coordinate: tuple[int, ...] | None
    """Of this rank on the mesh of the layout; None where it has no part in it."""
