"""Saving in the background: plan and stage now, write and commit while the training goes on.

After ``async_save`` has returned nothing of it uses the process group; the ranks talk over
connections of their own. Threads are plain ones, since executors refuse work while the interpreter
ends, when a save may still have to be brought to its end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from dtckpt.errors import Busy

from ...storage.base import Store
from ..compression.choosing import Compress
from ..ranks.together import DEFAULT_TIMEOUT, Ranks, ranks_of
from ..staging.area import StagingArea, StagingPool
from ..staging.quiet import Spreading, require_spreading
from ..state.tree import GiveState, Stateful
from .exiting import AtExit
from .handle import Afterwards, SaveHandle
from .job import CheckReplicas, SaveJob, SaveOptions

IfBusy = Literal["wait", "refuse", "supersede"]


def async_save(
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
    if_busy: IfBusy = "wait",
    at_exit: AtExit = "wait",
    spread: Spreading = False,
    staged_copies: int = 1,
) -> SaveHandle:
    """Save as ``save`` does, but return once what this rank writes has been copied.

    The checkpoint holds the state as it is during the call; tensors may change afterwards. Writing
    and committing go on in a thread, without any collective on the process group. The memory for
    the copies, as much as this rank writes, is kept for the next save.

    One save at a time is under way for a group. If another one is, ``if_busy`` says what happens:
    "wait" for its end, "refuse" with Busy on all ranks, or "supersede" it, which cancels it. All
    ranks give the same. When the interpreter exits during the save, ``at_exit`` says whether it
    waits for its end or aborts it, so that no checkpoint comes of it.

    ``spread=True`` returns once it is clear who copies what, and spreads the copying over the
    forward and backward passes that follow: a little with each gradient, what is left at the
    beginning of the next step of any ``torch.optim.Optimizer``; on a GPU beside them, on a stream
    of its own. It is for what only such steps change: the parameters of optimizers that are in the
    state, the other parameters of modules that have some of these, and the state of the optimizers.
    All else (buffers, averages of weights, tensors of nobody's, what is small) is copied within the
    call. For a state that holds state dicts in the place of modules and optimizers, give a list of
    these: ``spread=[model, optimizer]``. What is copied later is watched: where a tensor was
    written to meanwhile, by any operator that torch counts, the save fails with StateChanged, which
    names it, and nothing is committed. Writes that torch does not count (through ``.data``, NumPy
    or DLPack, by collectives, by kernels of one's own, by lists of torch's DTensors) are found on a
    GPU by a sum of all bytes; on a CPU by some hundred elements of each tensor, so that a write to
    a few elements may be missed; ``spread="checked"`` adds up all bytes there, too, which takes
    half as long as the copy. Where something else is to change the state,
    ``handle.finish_staging()`` first. A rank that comes to no backward pass and no step within
    ``timeout`` fails the save.

    Where ranks hold the same cells of all tensors, ``staged_copies=2`` has each part copied by the
    rank that writes it and by another one, which writes it if the first one dies or falls silent
    before it has, as in ``save``. It takes twice the memory and the time of the copies; a higher
    number lets as many ranks less one be lost. What a rank alone holds (cells without replicas,
    tensors of its own in ``PerRank`` or ``PerCoordinate``) nobody else can copy.

    Errors of planning are raised here, the same on all ranks; those of copying and the rest by the
    handle. A handle that nobody asks logs its error when the next save begins or the process ends;
    in the latter case the process ends with exit code 1, after all its exit handlers. So does one
    whose save still hangs when the exit has waited for ``timeout``. What was aborted is no failure.
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
        staged_copies=staged_copies,
    )
    ranks = ranks_of(
        process_group, no_dist=no_dist, timeout=timeout, purpose="async_save", target=checkpoint_id
    )
    way = Background(if_busy=if_busy, at_exit=at_exit, spread=spread)
    return begin_save(ranks, lambda: state_dict, checkpoint_id, options, way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """How a save goes on in the background."""

    if_busy: IfBusy = "wait"
    at_exit: AtExit = "wait"
    spread: Spreading = False
    afterwards: Afterwards | None = None
    """Called in the save's thread once it has ended well, before its ranks part."""


def begin_save(
    ranks: Ranks,
    state: GiveState,
    checkpoint_id: str | os.PathLike[str] | Store,
    options: SaveOptions,
    way: Background,
) -> SaveHandle:
    """Do what ``async_save`` does, over given ranks."""
    timeout = options.timeout
    before: SaveHandle | None = ranks.memory.get("save")
    pool: StagingPool = ranks.memory.setdefault("staging", StagingPool())
    area: StagingArea | None = None
    job = SaveJob(ranks, options)
    make_way = partial(_make_way, before, way, timeout, ranks)
    try:
        job.plan(state, checkpoint_id, first=make_way)
        area = pool.take()
        job.stage(area, way.spread)
        job.recorder.call_returns()
    except BaseException as error:
        ranks.close(error)
        job.forget_state()
        if area is not None:
            pool.give_back(area)
        raise
    give_back = partial(pool.give_back, area)
    handle = SaveHandle(job, way.at_exit, timeout, give_back, way.afterwards)
    handle.start(ranks)
    ranks.memory["save"] = handle
    return handle


def _make_way(before: SaveHandle | None, way: Background, timeout: timedelta, ranks: Ranks) -> None:
    """Deal with a save that may still be under way."""
    if way.if_busy not in ("wait", "refuse", "supersede"):
        raise ValueError(f"if_busy is 'wait', 'refuse' or 'supersede', got {way.if_busy!r}")
    if way.at_exit not in ("wait", "abort"):
        raise ValueError(f"at_exit is 'wait' or 'abort', got {way.at_exit!r}")
    require_spreading(way.spread)
    if before is None:
        return
    if way.if_busy == "refuse" and not before.done():
        raise Busy(
            f"{before.url}: this save is still under way and no other one may begin: {before!r}. "
            "Wait for its result(), or pass if_busy='wait'"
        )
    if way.if_busy == "supersede":
        before.cancel()
    before.make_way(timeout, ranks.tell_alive)
