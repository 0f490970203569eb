"""dtckpt itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtckpt import checkpoint

from ..frame.row import OURS
from ..state import State
from .base import Pending


class Ours:
    """``dtckpt.checkpoint`` at its defaults: checksums, fsync, verified loads."""

    name = OURS

    read_once: bool | None = None
    storage_options: Mapping[str, Any] | None = None

    def save(self, state: State, path: Path) -> None:
        checkpoint.save(
            state.tensors,
            path,
            process_group=state.group,
            no_dist=state.group is None,
            storage_options=self.storage_options,
        )

    def load(self, state: State, path: Path) -> None:
        checkpoint.load(
            state.tensors,
            path,
            process_group=state.group,
            no_dist=state.group is None,
            read_once=self.read_once,
        )


class OursPast(Ours):
    """The same, by another name where it is compared with saves that stay in the page cache."""

    name = f"{OURS}, past the page cache"


class OursCached(Ours):
    """The same, but what is saved stays in the page cache."""

    storage_options: Mapping[str, Any] | None = {"direct_io": False}


class OursAlone(Ours):
    """The same, but each rank reads for itself all that it needs."""

    name = f"{OURS}, each for itself"
    read_once = False


def start_save(state: State, path: Path) -> Pending:
    """Start a save in the background."""
    return checkpoint.async_save(state.tensors, path, process_group=state.group)
