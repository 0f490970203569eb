"""dtckpt itself."""

from __future__ import annotations

from pathlib import Path

from dtckpt import checkpoint

from ..frame.row import OURS
from ..state import State
from .base import Pending


class Ours:
    """``dtckpt.checkpoint`` at its defaults: checksums, fsync, verified loads."""

    name = OURS

    read_once: bool | None = None

    def save(self, state: State, path: Path) -> None:
        no_dist = state.group is None
        checkpoint.save(state.tensors, path, process_group=state.group, no_dist=no_dist)

    def load(self, state: State, path: Path) -> None:
        checkpoint.load(
            state.tensors,
            path,
            process_group=state.group,
            no_dist=state.group is None,
            read_once=self.read_once,
        )


class OursOnce(Ours):
    """The same, but ranks that load read each block once and exchange what it holds."""

    name = f"{OURS}, read once"
    read_once = True


def start_save(state: State, path: Path) -> Pending:
    """Start a save in the background."""
    return checkpoint.async_save(state.tensors, path, process_group=state.group)
