"""``local_map`` under the name of torch's module."""

from __future__ import annotations

from ..parallel.local_map import PlacementType, local_map

__all__ = ["PlacementType", "local_map"]
