"""Base classes of DCP's storages: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]
