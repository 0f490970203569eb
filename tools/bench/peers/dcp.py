"""torch.distributed.checkpoint."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as _dcp

from ..state import State
from .base import Pending

# Its functions are annotated in part.
_api: Any = _dcp


class Dcp:
    """torch.distributed.checkpoint with its default writer, which syncs files."""

    name = "DCP"

    def __init__(self) -> None:
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")

    def save(self, state: State, path: Path) -> None:
        _api.save(dict(state.tensors), checkpoint_id=path, **_ranks(state))

    def load(self, state: State, path: Path) -> None:
        _api.load(dict(state.tensors), checkpoint_id=path, **_ranks(state))


def start_save(state: State, path: Path) -> Pending:
    """Start a save in the background."""
    return _api.async_save(dict(state.tensors), checkpoint_id=path, process_group=state.group)


def _ranks(state: State) -> dict[str, Any]:
    return {"process_group": state.group, "no_dist": state.group is None}
