"""torch_checkpointing, an optional peer.

On processors without CUDA only its synchronous saves and loads into the same layout work, and only
without direct I/O. It does not sync files, so that is done for it, within the measured time.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..folders import sync_files
from ..state import State
from .base import Missing

NAME = "torch_checkpointing"


class TorchCheckpointing:
    """``CheckpointManager`` with a synchronous saver; one per process, made before all timing."""

    name = NAME

    def __init__(self) -> None:
        """Raise Missing where the package is not installed."""
        try:
            package: Any = importlib.import_module("torch_checkpointing")
            storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        except ImportError as error:
            raise Missing(f"not installed ({error}); see docs/benchmarks.md") from error
        config = package.CheckpointManager.Config(
            save=package.SyncCheckpointSaverConfig(),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager: Any = package.CheckpointManager(config)

    def save(self, state: State, path: Path) -> None:
        """Save this rank's shards and sync them, once the first rank has put them in place."""
        self._manager.save(str(path), {"state": state.tensors})
        dist.barrier(state.group)
        sync_files(path / f"state_{dist.get_rank()}.pt")

    def load(self, state: State, path: Path) -> None:
        """Load this rank's shards into their tensors."""
        self._manager.load(str(path), into={"state": state.tensors})
