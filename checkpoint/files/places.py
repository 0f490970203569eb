"""What lies where in the directory of a checkpoint."""

from __future__ import annotations

MANIFEST = "manifest.json"
"""Written last and atomically: its presence is the commit."""

DATA = "data"
"""Directory of the files of a checkpoint."""
RECORDS = "deleted"
"""Directory in which those who delete a checkpoint keep what they need to finish."""


def data_path(save_id: str, rank: int, *, is_compressed: bool = False) -> str:
    """Return the name of a rank's data file; a save id is never used twice."""
    return f"{DATA}/{save_id}/{rank:05d}.{'compressed' if is_compressed else 'safetensors'}"


def record_path(checkpoint: str) -> str:
    """Return the name of the record that a run keeps of a committed checkpoint, beside it."""
    return f"{checkpoint}.json"
