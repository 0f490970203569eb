"""``register_sharding`` under the name of torch's module."""

from __future__ import annotations

from ..ops.user_rules.register_sharding import register_sharding

__all__ = ["register_sharding"]
