"""Placements under the name of torch's module: ``from ... import placement_types``."""

from __future__ import annotations

from .geometry.placement import HeadTail, Packed, Partial, Placement, Ragged, Replicate, Shard
from .mesh.spec import DTensorSpec, TensorMeta

__all__ = [
    "DTensorSpec",
    "HeadTail",
    "Packed",
    "Partial",
    "Placement",
    "Ragged",
    "Replicate",
    "Shard",
    "TensorMeta",
]
