"""Stagers of ``async_save``: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)

__all__ = [
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "StagingOptions",
]
