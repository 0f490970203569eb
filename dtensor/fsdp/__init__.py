"""Modules whose parameters are sharded; what torch has under ``torch.distributed.fsdp``."""

from __future__ import annotations

from .fully_shard import fully_shard
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from .policies import MixedPrecisionPolicy

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
