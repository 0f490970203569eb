"""``CheckpointException``: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["CheckpointException"]
