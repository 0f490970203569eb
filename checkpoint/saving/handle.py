"""A save that goes on in the background, and what may be asked of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta

from dtckpt.errors import Busy, Cancelled, Timeout
from dtckpt.logs import logger_of

from ...dtensor.comm.traffic import observers_here, observing
from ..ranks.together import Ranks, closing
from .exiting import AtExit, forget, remember
from .finishing import SaveReport
from .job import SaveJob

logger = logger_of("checkpoint")

_WAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """How far this rank is with its part of a save."""

    written_bytes: int
    total_bytes: int
    staged_bytes: int
    """Copied, so that the tensors may change."""


class SaveHandle:
    """A save that goes on in the background."""

    def __init__(
        self,
        job: SaveJob,
        at_exit: AtExit,
        timeout: timedelta,
        on_end: Callable[[], None],
        afterwards: Afterwards | None = None,
    ) -> None:
        """``afterwards`` is called in the save's thread once it has ended well.

        It may use the ranks of the save, and nobody waits for it.
        """
        self._job = job
        self.at_exit: AtExit = at_exit
        self._timeout = timeout
        self._on_end = on_end
        self._afterwards = afterwards
        self._future: Future[SaveReport] = Future()
        self._seen = False
        self._observers = observers_here()

    @property
    def url(self) -> str:
        """Where it saves to."""
        return self._job.store.url

    @property
    def report(self) -> SaveReport | None:
        """What the save did; None while it is under way, and where it failed."""
        future = self._future
        return future.result() if future.done() and future.exception() is None else None

    @property
    def error(self) -> BaseException | None:
        """What the save failed with; None while it is under way, and where it succeeded.

        Unlike ``exception`` this does not count as having been told.
        """
        return self._future.exception() if self._future.done() else None

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

    def finish_staging(self) -> None:
        """Copy at once what ``spread=True`` has left to be copied; the tensors may change then.

        Called where something else than an optimizer changes them, in the thread that does so; done
        at the beginning of every optimizer's step, and by ``result`` in the thread that has saved.
        A failure is told by ``result``.
        """
        if (spread := self._job.spread) is not None and not self._job.cancelled.is_set():
            spread.finish()

    def _finish_own_staging(self) -> None:
        """The same in the thread that has saved, or once that is over: nobody else would do it."""
        if (spread := self._job.spread) is not None and not self._job.cancelled.is_set():
            spread.finish_if_own()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as ``result`` does, and return the error, or None where the save succeeded."""
        self._wait(timeout)
        return self._future.exception()

    def _wait(self, timeout: float | None) -> None:
        self._finish_own_staging()
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
        """Return how many bytes this rank has copied and written, of how many."""
        job = self._job
        left = 0 if job.spread is None else job.spread.num_bytes - job.spread.copied_bytes
        return SaveProgress(job.written_bytes, job.total_bytes, max(job.total_bytes - left, 0))

    def standing(self) -> tuple[int, int] | None:
        """Return written bytes and bytes in all; None once the save has ended."""
        at = self.progress()
        return None if self.done() else (at.written_bytes, at.total_bytes)

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call ``callback(handle)`` at the end, in the save's thread; at once if it is over."""
        self._future.add_done_callback(lambda _: callback(self))

    def start(self, ranks: Ranks) -> None:
        """Begin the part in the background."""
        go = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(ranks, go), name="dtckpt-save", daemon=True
        )
        remember(self)
        try:
            thread.start()
        except BaseException as error:
            self._end(ranks, error, None)
            self._see()
            raise
        finally:
            go.set()

    def _run(self, ranks: Ranks, go: threading.Event) -> None:
        go.wait()  # or the caller would have to, until the interpreter changes threads
        try:
            with observing(self._observers):
                report = self._job.finish()
        except BaseException as error:
            self._end(ranks, error, None)
        else:
            self._end(ranks, None, report)

    def _end(self, ranks: Ranks, error: BaseException | None, report: SaveReport | None) -> None:
        afterwards = self._afterwards if report is not None else None
        try:
            if afterwards is None:
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
        if afterwards is not None:
            with closing(ranks):
                afterwards(self, ranks)

    def make_way(self, timeout: timedelta, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Wait for the end; a failure that nobody has asked for is logged, and False returned.

        Errors are those of ``outcome``.
        """
        is_seen = self._seen
        error = self.outcome(timeout, on_wait)
        if error is None or is_seen or isinstance(error, Cancelled):
            return True
        logger.error("a save in the background failed, and nobody asked for it: %s", error)
        return False

    def outcome(
        self, timeout: timedelta, on_wait: Callable[[], None] = lambda: None
    ) -> BaseException | None:
        """Wait for the end, and return the error, or None where the save succeeded.

        Raises Busy once this rank's part has not got on for ``timeout``: its storage hangs. Others
        that do not get on are found out by the save itself, which gives them up in its own time.
        """
        began = time.monotonic()
        while True:
            self._finish_own_staging()
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
        self._see()
        return error

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


Afterwards = Callable[[SaveHandle, Ranks], object]
