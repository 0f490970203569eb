"""Meshes, placements, layouts and distributed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from .box import Box
    from .irregular import IrregularLayout
    from .layout import Layout
    from .mesh import Mesh
    from .placement import Partial, Placement, Ragged, Replicate, Shard, parse_placements

__all__ = [
    "Box",
    "IrregularLayout",
    "Layout",
    "Mesh",
    "Partial",
    "Placement",
    "Ragged",
    "Replicate",
    "Shard",
    "parse_placements",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "Box": ".box",
        "IrregularLayout": ".irregular",
        "Layout": ".layout",
        "Mesh": ".mesh",
        "Partial": ".placement",
        "Placement": ".placement",
        "Ragged": ".placement",
        "Replicate": ".placement",
        "Shard": ".placement",
        "parse_placements": ".placement",
    },
)
