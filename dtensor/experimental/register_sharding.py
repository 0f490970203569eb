"""``register_sharding`` under the name of torch's module."""

from __future__ import annotations

from ..ops.engine.register_sharding import register_sharding

__all__ = ["register_sharding"]
