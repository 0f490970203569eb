"""``save``: flatten, agree, write in parallel, commit once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ...storage.base import Store
from ..compression.choosing import Compress
from ..ranks.together import DEFAULT_TIMEOUT, Ranks, closing, ranks_of
from ..state.tree import GiveState, Stateful
from .finishing import SaveReport
from .job import CheckReplicas, SaveJob, SaveOptions


def save(
    state_dict: Mapping[Any, Any] | Stateful,
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    process_group: Any = None,
    no_dist: bool = False,
    overwrite: bool = False,
    metadata: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    check_replicas: CheckReplicas = None,
    base: str | os.PathLike[str] | Store | None = None,
    elsewhere: Sequence[str | os.PathLike[str] | Store] = (),
    compress: Compress = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> SaveReport:
    """Write a checkpoint and return when it is durable and committed.

    Every rank of ``process_group`` (default: the default group; without one, or with ``no_dist``,
    this process alone) calls this with its part of the state: a dict, nested at will, of DTensors
    of ours or torch's, plain tensors and numpy arrays (which count as replicated and must be equal
    on all ranks; see ``PerRank``), objects with ``state_dict()``, and plain values; or such an
    object alone. Tensors are read as they are during the call. State of torch optimizers is stored
    by the names of its parameters, where the state or the optimizer tells them.

    ``checkpoint_id`` is a directory, a URL such as ``s3://bucket/run/step-1000`` (with
    ``storage_options`` passed on to its driver), or a ``Store``. ``metadata`` is any JSON value
    and is kept in the manifest, that of the first rank; a warning names ranks that gave another.
    ``allow_pickle`` pickles values that the format does not hold.

    Plain tensors above 256 KiB are compared by a sample of their pages, other ones at every save.
    ``check_replicas`` compares them whole, and the copies that ranks hold of DTensors, too, where
    it makes a difference an error, or warns of it; hardware that computes wrong silently is found
    so. It takes the time to hash all that a rank holds, before anything is written.

    ``base`` makes the save incremental: it names an earlier checkpoint in the same directory, and
    what has the same bytes there is referred to instead of written again. The base may then not be
    deleted before the new one.

    ``elsewhere`` are other places, paths or open stores, of which the next is taken where the
    storage fails on some rank, be it that a disk is full or that a store does not answer; the
    report's ``url`` says where the checkpoint is. What is written there refers to no base.

    ``compress="zstd"`` stores blocks of data files in fewer bytes where they shrink: bf16 weights
    by a third, fp32 and moments of optimizers by a sixth, fp32 that was made of bf16 by two thirds.
    Any part is read as before, a block at a time. It takes about a core second for each GB, on as
    many cores as there are for each rank of the host, and half of that at a load, so it pays where
    storage is slower or dear. Such files are no safetensors, and versions of this library before
    refuse them. ``"auto"`` compresses where that is measured to be sooner: the first save of a
    process into a directory of checkpoints is not compressed and tells how fast the storage is;
    later ones encode a few blocks of each rank's part to compare.

    ``timeout`` bounds how long ranks wait for one that shows no sign of life; a save of any length
    may go on as long as all do. If a rank other than the first one dies or falls silent once it is
    clear who writes what, and another one holds the same cells of all tensors (replicas of data
    parallelism), that one writes its part, and the others theirs again, so that nothing depends on
    what the lost one may still do. The report's ``stood_in_for`` tells, and a warning. What the
    lost rank alone held cannot be saved, and the error says so. Nor does such a save replace what
    another one has committed there since the call.

    Raises the same error on every rank: AlreadyCommitted before anything is written if a
    checkpoint is there and ``overwrite`` is not set; Unsavable, LayoutMismatch, StorageError,
    RankFailed where a rank died or fell silent whose part no other one can write, or another
    CheckpointError naming the rank, the phase and the cause. After an error no half-written
    checkpoint is ever taken for one, and one that was there is as it was, unless the very last step
    went through and only its confirmation was lost (a rank died in the commit): then the new one is
    there, complete.
    """
    options = SaveOptions(
        overwrite=overwrite,
        metadata=metadata,
        storage_options=storage_options or {},
        allow_pickle=allow_pickle,
        check_replicas=check_replicas,
        base=base,
        elsewhere=elsewhere,
        compress=compress,
        timeout=timeout,
    )
    ranks = ranks_of(
        process_group, no_dist=no_dist, timeout=timeout, purpose="save", target=checkpoint_id
    )
    return save_now(ranks, lambda: state_dict, checkpoint_id, options)


def save_now(
    ranks: Ranks,
    state: GiveState,
    checkpoint_id: str | os.PathLike[str] | Store,
    options: SaveOptions,
) -> SaveReport:
    """Do what ``save`` does, over given ranks."""
    with closing(ranks):
        job = SaveJob(ranks, options)
        job.plan(state, checkpoint_id, first=lambda: _wait_for_another(ranks, options.timeout))
        return job.finish()


def _wait_for_another(ranks: Ranks, timeout: timedelta) -> None:
    """Wait for a save in the background over the same group, which may share its target."""
    if (before := ranks.memory.get("save")) is not None:
        before.make_way(timeout, ranks.tell_alive)
