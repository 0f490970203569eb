"""Read items of chunks: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

__all__ = ["create_read_items_for_chunk_list"]
