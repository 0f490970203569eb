"""``load`` under torch's name and arguments, for whatever dtckpt reads."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint import state_dict_loader as torch_loader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from dtckpt.errors import CheckpointError

from ..loading import loader
from .api import failing_as_torch
from .filesystem import FileSystemReader
from .storage_reader import CheckpointReader

__all__ = ["load", "load_state_dict"]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Load as ``torch.distributed.checkpoint.load`` is called, and as dtckpt's ``load`` does it.

    The checkpoint must have all of the state, and may have more; tensors are cast to what they are
    loaded into. Objects of the state get theirs by ``load_state_dict``, other values are replaced.
    With a ``planner``, or another ``storage_reader`` than ours, torch's own ``load`` does the work,
    by our reader unless one is given.

    Errors are those of dtckpt's ``load``, and CheckpointException, too; of torch's, that, in which
    they lie.
    """
    reader = storage_reader
    if reader is None:
        if checkpoint_id is None:
            raise CheckpointError("say what to load: checkpoint_id= or storage_reader=")
        reader = FileSystemReader(checkpoint_id)
    if planner is None and isinstance(reader, CheckpointReader):
        reader.reset(checkpoint_id)
        with failing_as_torch():
            loader.load(
                state_dict,
                reader.place,
                process_group=process_group,
                no_dist=no_dist,
                strict="state",
                dtype_policy=reader.dtype_policy,
                storage_options=reader.storage_options,
                allow_pickle=reader.allow_pickle,
            )
        return
    torch_loader.load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Load as ``load`` does, under the arguments that it had before torch 2.3."""
    load(
        state_dict,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )
