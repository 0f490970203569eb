"""Models trained on several ranks; what torch has under ``torch.distributed.tensor.parallel``."""

from __future__ import annotations

from .base_style import ParallelStyle
from .linear import ColwiseParallel, RowwiseParallel
from .loss import loss_parallel, parallel_cross_entropy
from .parallelize import parallelize_module, placement_rules
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .sequence import SequenceParallel
from .tracing import placement_rules_of, plan_of

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallel_cross_entropy",
    "parallelize_module",
    "placement_rules",
    "placement_rules_of",
    "plan_of",
]
