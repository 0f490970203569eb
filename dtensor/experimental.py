"""What torch has under ``torch.distributed.tensor.experimental``."""

from __future__ import annotations

from .mesh.modes import implicit_replication
from .ops.engine.register_sharding import register_sharding
from .parallel.local_map import local_map

__all__ = ["implicit_replication", "local_map", "register_sharding"]
