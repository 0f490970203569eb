"""Saving in the background: plan and stage now, write and commit while the training goes on.

After ``async_save`` has returned nothing of it uses the process group; the ranks talk over
connections of their own. Threads are plain ones, since executors refuse work while the interpreter
ends, when a save may still have to be brought to its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from dtckpt.errors import Busy, Cancelled, Timeout
from dtckpt.logs import logger_of

from ...dtensor.comm.traffic import observers_here, observing
from ...storage.base import Store
from ..ranks.together import DEFAULT_TIMEOUT, Ranks, ranks_of, together
from ..state.tree import Stateful
from .exiting import AtExit, forget, remember
from .job import CheckReplicas, SaveJob, SaveOptions, SaveReport
from .staging import StagingArea, StagingPool

logger = logger_of("checkpoint")

IfBusy = Literal["wait", "refuse", "supersede"]

_WAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """How far this rank is with its part of a save."""

    written_bytes: int
    total_bytes: int


class SaveHandle:
    """A save that goes on in the background."""

    def __init__(
        self, job: SaveJob, at_exit: AtExit, timeout: timedelta, on_end: Callable[[], None]
    ) -> None:
        self._job = job
        self.at_exit: AtExit = at_exit
        self._timeout = timeout
        self._on_end = on_end
        self._future: Future[SaveReport] = Future()
        self._seen = False
        self._observers = observers_here()

    @property
    def url(self) -> str:
        """Where it saves to."""
        return self._job.store.url

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the end, at most ``timeout`` seconds, and return the report.

        Raises what the save failed with, the same on all ranks; Cancelled if it was cancelled;
        Timeout if it has not ended in time, in which case it goes on.
        """
        self._wait(timeout)
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as ``result`` does, and return the error, or None where the save succeeded."""
        self._wait(timeout)
        return self._future.exception()

    def _wait(self, timeout: float | None) -> None:
        try:
            self._future.exception(timeout)
        except FutureTimeout:
            raise Timeout(
                f"{self.url}: the save has not ended within {timeout:g} s; it goes on"
            ) from None
        self._see()

    def _see(self) -> None:
        """Note that somebody knows how it ended."""
        self._seen = True
        forget(self)

    def cancel(self) -> None:
        """Ask the save to stop; it fails with Cancelled on all ranks unless it was as good as done.

        One rank that cancels is enough. Returns at once; ``exception`` tells what became of it.
        """
        self._job.cancelled.set()

    def progress(self) -> SaveProgress:
        """Return how many bytes this rank has written, of how many."""
        return SaveProgress(self._job.written_bytes, self._job.total_bytes)

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call ``callback(handle)`` at the end, in the save's thread; at once if it is over."""
        self._future.add_done_callback(lambda _: callback(self))

    def start(self, ranks: Ranks) -> None:
        """Begin the part in the background."""
        thread = threading.Thread(target=self._run, args=(ranks,), name="dtckpt-save", daemon=True)
        remember(self)
        try:
            thread.start()
        except BaseException as error:
            self._end(ranks, error, None)
            self._see()
            raise

    def _run(self, ranks: Ranks) -> None:
        try:
            with observing(self._observers):
                report = self._job.finish()
        except BaseException as error:
            self._end(ranks, error, None)
        else:
            self._end(ranks, None, report)

    def _end(self, ranks: Ranks, error: BaseException | None, report: SaveReport | None) -> None:
        try:
            ranks.close(error)
            self._job.forget_state()
            self._on_end()
        finally:  # whatever happens here, nobody must wait for ever
            if error is None or isinstance(error, Cancelled):
                forget(self)
            if report is not None:
                self._future.set_result(report)
            else:
                self._future.set_exception(error)

    def make_way(self, timeout: timedelta, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Wait for the end; a failure that nobody has asked for is logged, and False returned.

        Raises Busy once this rank's part has not got on for ``timeout``: its storage hangs. Others
        that do not get on are found out by the save itself, which gives them up in its own time.
        """
        began = time.monotonic()
        while True:
            try:
                error = self._future.exception(_WAIT_SECONDS)
                break
            except FutureTimeout:
                on_wait()
            stalled = min(self._job.ranks.stalled_seconds(), time.monotonic() - began)
            if stalled > timeout.total_seconds():
                raise Busy(
                    f"{self.url}: this save has not got on for {timeout.total_seconds():g} s and "
                    f"no other one may begin: {self!r}. Its storage seems to hang"
                )
        if error is None or self._seen or isinstance(error, Cancelled):
            return True
        self._see()
        logger.error("a save in the background failed, and nobody asked for it: %s", error)
        return False

    def end_with_process(self) -> bool:
        """Bring the save to its end, as it was asked to, and return whether all is well.

        It is not if the save failed, or hangs, and nobody has been told; that is logged.
        """
        if self.at_exit == "abort":
            self.cancel()
        try:
            return self.make_way(self._timeout)
        except Busy as error:
            logger.warning("given up at the end of the process: %s", error)
            return False

    def __repr__(self) -> str:
        progress = self.progress()
        state = "done" if self.done() else "under way"
        return (
            f"<SaveHandle {self.url!r} {state}, {progress.written_bytes} of "
            f"{progress.total_bytes} bytes>"
        )


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
    timeout: timedelta = DEFAULT_TIMEOUT,
    if_busy: IfBusy = "wait",
    at_exit: AtExit = "wait",
) -> SaveHandle:
    """Save as ``save`` does, but return once what this rank writes has been copied.

    The checkpoint holds the state as it is during the call; tensors may change afterwards. Writing
    and committing go on in a thread, without any collective on the process group. The memory for
    the copies, as much as this rank writes, is kept for the next save.

    One save at a time is under way for a group. If another one is, ``if_busy`` says what happens:
    "wait" for its end, "refuse" with Busy on all ranks, or "supersede" it, which cancels it. All
    ranks give the same. When the interpreter exits during the save, ``at_exit`` says whether it
    waits for its end or aborts it, so that no checkpoint comes of it.

    Errors of planning and staging are raised here, the same on all ranks; those of the rest by the
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
    )
    ranks = ranks_of(process_group, no_dist=no_dist, timeout=timeout, purpose="async_save")
    before: SaveHandle | None = ranks.memory.get("save")
    pool: StagingPool = ranks.memory.setdefault("staging", StagingPool())
    area: StagingArea | None = None
    job = SaveJob(ranks, options)
    make_way = partial(_make_way, before, if_busy, at_exit, timeout, ranks)
    try:
        job.plan(state_dict, checkpoint_id, first=make_way)
        area = pool.take()
        together(ranks, "save: stage", partial(job.stage, area))
    except BaseException as error:
        ranks.close(error)
        if area is not None:
            pool.give_back(area)
        raise
    handle = SaveHandle(job, at_exit, timeout, on_end=partial(pool.give_back, area))
    handle.start(ranks)
    ranks.memory["save"] = handle
    return handle


def _make_way(
    before: SaveHandle | None, if_busy: IfBusy, at_exit: AtExit, timeout: timedelta, ranks: Ranks
) -> None:
    """Deal with a save that may still be under way."""
    if if_busy not in ("wait", "refuse", "supersede"):
        raise ValueError(f"if_busy is 'wait', 'refuse' or 'supersede', got {if_busy!r}")
    if at_exit not in ("wait", "abort"):
        raise ValueError(f"at_exit is 'wait' or 'abort', got {at_exit!r}")
    if before is None:
        return
    if if_busy == "refuse" and not before.done():
        raise Busy(
            f"{before.url}: this save is still under way and no other one may begin: {before!r}. "
            "Wait for its result(), or pass if_busy='wait'"
        )
    if if_busy == "supersede":
        before.cancel()
    before.make_way(timeout, ranks.tell_alive)
