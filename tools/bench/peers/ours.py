"""dtckpt itself."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dtckpt import checkpoint

from ..frame.row import OURS
from ..state import ShardedState
from .base import Pending


class Ours:
    """``dtckpt.checkpoint`` at its defaults: checksums, fsync, verified loads."""

    name = OURS

    def save(self, state: ShardedState, path: Path) -> None:
        """Save with the ranks of the state's mesh."""
        checkpoint.save(state.tensors, path, process_group=state.mesh.get_group())

    def load(self, state: ShardedState, path: Path) -> None:
        """Load with the ranks of the state's mesh."""
        checkpoint.load(state.tensors, path, process_group=state.mesh.get_group())

    def save_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Save from this process alone."""
        checkpoint.save(tensors, path, no_dist=True)

    def load_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Load in this process alone."""
        checkpoint.load(tensors, path, no_dist=True)


class OursOnce(Ours):
    """The same, but ranks that load read each block once and exchange what it holds."""

    name = f"{OURS}, read once"

    def load(self, state: ShardedState, path: Path) -> None:
        """Load with the ranks of the state's mesh."""
        group = state.mesh.get_group()
        checkpoint.load(state.tensors, path, process_group=group, read_once=True)


def start_save(state: ShardedState, path: Path) -> Pending:
    """Start a save in the background."""
    return checkpoint.async_save(state.tensors, path, process_group=state.mesh.get_group())
