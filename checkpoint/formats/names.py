"""What is looked for before the code that reads it is imported."""

from __future__ import annotations

OF_TORCH = "torch.distributed.checkpoint"
"""The name of its format."""
METADATA = ".metadata"
"""Its file that says what there is."""
