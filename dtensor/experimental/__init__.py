"""What torch has under ``torch.distributed.tensor.experimental``, by its names and modules."""

from __future__ import annotations

from ..mesh.modes import implicit_replication
from .attention import context_parallel
from .func_map import local_map
from .register_sharding import register_sharding  # before anybody imports the module of that name

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]
