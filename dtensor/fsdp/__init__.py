"""Modules whose parameters are sharded; what torch has under ``torch.distributed.fsdp``."""

from __future__ import annotations

from .data_axes import DataParallelMeshDims
from .fully_shard import fully_shard
from .gradient_states import gradient_state_dict, load_gradient_state_dict
from .module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "gradient_state_dict",
    "load_gradient_state_dict",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
