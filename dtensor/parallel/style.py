"""All parallel styles, under the name of torch's module."""

from __future__ import annotations

from .base_style import ParallelStyle
from .linear import ColwiseParallel, RowwiseParallel
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .sequence import SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]
