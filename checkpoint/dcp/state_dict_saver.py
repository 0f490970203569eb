"""``save`` and ``async_save`` under torch's names and arguments, for checkpoints of dtckpt."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint import state_dict_saver as torch_saver
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter

from dtckpt.errors import CheckpointError

from ..saving import background, saver
from ..saving.background import SaveHandle
from ..saving.finishing import SaveReport
from .api import failed_as_torch, failing_as_torch
from .checked_stager import CheckedStager, default_stager
from .filesystem import FileSystemWriter
from .storage_writer import CheckpointWriter, refuse_alone

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "async_save",
    "save",
    "save_state_dict",
]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Save as ``torch.distributed.checkpoint.save`` is called, and as dtckpt's ``save`` does it.

    A checkpoint that is there is replaced, as by torch's default writer, by one that is complete.
    Returns a SaveReport. With a ``planner``, or another ``storage_writer`` than ours, torch's own
    ``save`` does the work, into our writer unless one is given, and returns its Metadata.

    Errors are those of dtckpt's ``save``, and CheckpointException, too; of torch's, that, in which
    they lie.
    ``use_collectives=False`` is refused, since a checkpoint is one of all ranks.
    """
    writer = _writer(checkpoint_id, storage_writer, use_collectives=use_collectives)
    if planner is None and isinstance(writer, CheckpointWriter):
        with failing_as_torch():
            report = saver.save(
                state_dict, process_group=process_group, no_dist=no_dist, **_arguments(writer)
            )
        writer.save_id = report.save_id
        return report
    return torch_saver.save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Save in the background, as torch's ``async_save`` is called and dtckpt's does it.

    Returns a Future of what ``save`` returns. With a ``planner``, a stager or a process of one's
    own, or another ``storage_writer`` than ours, torch's own ``async_save`` does the work, into our
    writer unless one is given.
    """
    writer = _writer(checkpoint_id, storage_writer, use_collectives=use_collectives)
    in_thread = async_checkpointer_type == AsyncCheckpointerType.THREAD
    is_default = planner is None and async_stager is None and in_thread
    if is_default and isinstance(writer, CheckpointWriter):
        with failing_as_torch():
            handle = background.async_save(
                state_dict, process_group=process_group, no_dist=no_dist, **_arguments(writer)
            )
        return SaveFuture(handle, writer)
    if async_stager is None and isinstance(writer, AsyncStager):
        async_stager = writer  # as torch would; ours is one
    stager = async_stager or default_stager()
    async_stager = CheckedStager(stager, process_group, no_dist=no_dist)
    return torch_saver.async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Any:
    """Save as ``save`` does, under the arguments that it had before torch 2.3.

    The coordinator is the first rank, whatever ``coordinator_rank`` says.
    """
    return save(
        state_dict,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


class SaveFuture(Future[Any]):
    """A save in the background as a Future: who asks it, asks ``handle``."""

    def __init__(self, handle: SaveHandle, writer: CheckpointWriter) -> None:
        super().__init__()
        self.handle = handle
        self._writer = writer
        self.set_running_or_notify_cancel()
        handle.add_done_callback(lambda _: self.set_result(None))  # only that it has ended

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the end and return the report; raise what the save failed with."""
        with failing_as_torch():
            report = self.handle.result(timeout)
        self._writer.save_id = report.save_id
        return report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what the save failed with."""
        error = self.handle.exception(timeout)
        if error is not None:
            failed_as_torch(error)
        return error


def _writer(
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    *,
    use_collectives: bool,
) -> StorageWriter:
    """Return the writer of a save, which knows where to write and that it may."""
    writer = storage_writer
    if writer is None:
        if checkpoint_id is None:
            raise CheckpointError("say where to save: checkpoint_id= or storage_writer=")
        writer = FileSystemWriter(checkpoint_id)
    if isinstance(writer, CheckpointWriter):
        writer.reset(checkpoint_id)
        refuse_alone(use_collectives=use_collectives)
    return writer


def _arguments(writer: CheckpointWriter) -> dict[str, Any]:
    """Return what a writer says of a save, as arguments of dtckpt's ``save``."""
    return {
        "checkpoint_id": writer.place,
        "overwrite": writer.overwrite,
        "metadata": writer.metadata,
        "storage_options": writer.storage_options,
        "allow_pickle": writer.allow_pickle,
    }
