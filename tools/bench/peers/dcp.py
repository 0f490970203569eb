"""torch.distributed.checkpoint."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as _dcp
from torch import Tensor

from ..state import ShardedState
from .base import Pending

# Its functions are annotated in part.
_api: Any = _dcp


class Dcp:
    """torch.distributed.checkpoint with its default writer, which syncs files."""

    name = "DCP"

    def __init__(self) -> None:
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")

    def save(self, state: ShardedState, path: Path) -> None:
        """Save with the ranks of the state's mesh."""
        _api.save(dict(state.tensors), checkpoint_id=path, process_group=state.mesh.get_group())

    def load(self, state: ShardedState, path: Path) -> None:
        """Load with the ranks of the state's mesh."""
        _api.load(dict(state.tensors), checkpoint_id=path, process_group=state.mesh.get_group())

    def save_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Save from this process alone."""
        _api.save(dict(tensors), checkpoint_id=path, no_dist=True)

    def load_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Load in this process alone."""
        _api.load(dict(tensors), checkpoint_id=path, no_dist=True)


def start_save(state: ShardedState, path: Path) -> Pending:
    """Start a save in the background."""
    return _api.async_save(
        dict(state.tensors), checkpoint_id=path, process_group=state.mesh.get_group()
    )
