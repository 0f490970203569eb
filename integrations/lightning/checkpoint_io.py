"""``CheckpointIO``: what Lightning gives one rank to write, and asks all ranks to read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from ...checkpoint.ranks.base import DEFAULT_TIMEOUT
from ..frameworks import framework
from ..saver import Saver
from ..whole_state import read_whole

CheckpointIO: Any = framework("lightning", "lightning.fabric.plugins").CheckpointIO
move_data_to_device: Any = framework(
    "lightning", "lightning.fabric.utilities.apply_func"
).move_data_to_device


class DtckptIO(CheckpointIO):
    """Checkpoints of a Trainer or Fabric whose ranks hold all of the state: one device, or DDP.

    Lightning has one rank save; so does this, without a word to the others. A path such as
    ``epoch=0-step=4.ckpt`` becomes a folder, which ``dtckpt inspect`` and ``load`` read. Files that
    Lightning itself has saved are loaded, too.

    With ``async_save`` the training goes on while the copies are written. A checkpoint that is to
    be removed goes once the one that replaces it is durable, so one is there at any time. An error
    of the writing is raised by the next save, or at the end of the training.

    ``allow_pickle`` is for hyperparameters, or state of callbacks, that are neither tensors nor
    plain values, which else are refused by name.
    """

    def __init__(
        self,
        *,
        async_save: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        self._saver = Saver(
            in_background=async_save,
            no_dist=True,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
            timeout=timeout,
        )

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint, in place of what is there."""
        self._saver.save(
            checkpoint, path, metadata=told_of(checkpoint), storage_options=storage_options
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return what was saved; each rank reads it for itself.

        ``map_location`` is a device or None, which is the CPU. With ``weights_only`` what was
        pickled is refused.
        """
        self._saver.wait()
        found = read_whole(
            path,
            storage_options=self._saver.storage_options,
            allow_pickle=self._saver.allow_pickle and not weights_only,
        )
        if map_location is None:
            return found
        if not isinstance(map_location, str | torch.device):
            raise TypeError(f"map_location is a device, got {map_location!r}")
        return move_data_to_device(found, torch.device(map_location))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, once the save that is under way is durable."""
        self._saver.remove(path)

    def teardown(self) -> None:
        """Wait until all is durable, and raise the error of a save that failed."""
        self._saver.wait()


def told_of(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Return what the manifest says of a checkpoint, by which the newest one is found."""
    numbers = {key: checkpoint.get(key) for key in ("epoch", "global_step")}
    return {key: value for key, value in numbers.items() if isinstance(value, int)}
