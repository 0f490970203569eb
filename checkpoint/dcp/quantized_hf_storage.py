"""Reader of quantized Hugging Face checkpoints: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]
