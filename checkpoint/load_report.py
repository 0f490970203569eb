"""What a load tells its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, as one rank saw it. All names are those of leaves in the checkpoint."""

    url: str
    loaded: tuple[str, ...]
    """Tensors and values of this rank's state that were filled."""
    missing: tuple[str, ...]
    """Leaves of this rank's state that the checkpoint does not have; left as they were."""
    unexpected: tuple[str, ...]
    """Leaves of the checkpoint that were selected and that no rank asked for."""
    dropped: tuple[str, ...]
    """Values that some rank kept for itself (PerRank) which takes no part in this load."""
    kept: tuple[str, ...]
    """Values (PerRank) of this rank that it kept, since it took no part in the save."""
    by_position: tuple[str, ...]
    """State of optimizers that was given to the parameter of the same number, because nothing tells
    a name: not at the save, or not now. Only shapes vouch for it."""
    resharded: tuple[str, ...]
    """Loaded tensors of which this rank holds another part than at the save."""
    cast: Mapping[str, tuple[str, str]]
    """Saved dtype and loaded dtype of the tensors for which they differ, by their torch names."""
    bytes_needed: int
    """Bytes of this rank's destinations."""
    bytes_read: int
    """Bytes of data that this rank read to fill them, and those that it sent to others."""
    bytes_received: int
    """Bytes of its destinations that other ranks read and sent."""
    read_once: bool
    """Whether ranks read once what several of them would read, and sent it to each other."""
    read_once_reason: str
    """Why they did, or why each rank read for itself."""
