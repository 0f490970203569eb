"""Storage of Hugging Face checkpoints: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]
