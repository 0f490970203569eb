"""What has to be done for a run after its saves, by one rank and in the background.

Records of new checkpoints, marks on those that the run has gone back from, deletion of those that
need not stay, collection of what dead saves have left. All of it can be done again: what a killed
process has not come to is done by the next one.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from dtckpt.errors import CheckpointError, Corrupt, InUse, NotCommitted
from dtckpt.logs import logger_of

from ..cleaning import clean
from .keep import Keep, KnownStep, Surplus, surplus
from .run import ABANDONED, Run, RunListing, RunStep

logger = logger_of("checkpoint")

_TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """How one place of a run is kept."""

    run: Run
    keep: Keep
    leftovers_after: timedelta
    spare: Callable[[], Collection[str]] = tuple
    """Names what may not go yet, whatever ``keep`` says, and is not dead."""
    unrestored: set[str] = field(default_factory=set[str])
    """Names of what was there before a run that has not restored any of it; none of it goes."""

    def retain(self) -> None:
        """Delete the checkpoints that need not stay, once the newest one is known to be whole.

        What is newer and damaged is left alone, and does not count. Records come first, also of
        what is saved while others are being deleted.
        """
        self.run.write_noted()
        if self.keep.is_all:
            return
        choice = self.choose()
        if choice is not None and self.keep.best is not None and (choice.free or choice.cut):
            choice = self.choose(is_fresh=True)
        if choice is None:
            return
        for name in choice.free:
            if self.may_go(name):
                self.delete(name)
                self.run.write_noted()
        for base in choice.cut:
            if self.may_go(base):
                self.cut(base, choice.lent[base])
                self.run.write_noted()

    def choose(self, *, may_write: bool = True, is_fresh: bool = False) -> Surplus | None:
        """Return what need not stay; None while no checkpoint is known to be whole.

        Records that are missing are written, if that is allowed. ``is_fresh`` reads all records
        again: another process may have set metrics, and what is deleted is lost for good.
        """
        listing = self.run.look()
        newest = self.newest_whole(listing)
        if newest is None:
            return None
        known = [
            found
            for step in listing.steps
            if step.is_abandoned or step.number <= newest.number
            if (found := self.known(step, may_write=may_write, is_fresh=is_fresh)) is not None
        ]
        return surplus(known, self.keep, now=time.time())

    def may_go(self, name: str) -> bool:
        """Whether a checkpoint that need not stay may be deleted at all."""
        return name not in self.unrestored and name not in self.spare()

    def delete(self, name: str) -> None:
        """Delete a checkpoint, unless others refer to its files or it is damaged."""
        try:
            self.run.delete(name)
        except (InUse, Corrupt) as error:
            logger.info("%s", error)
        else:
            logger.info("deleted %s: %s", self.run.store.substore(name).url, self.keep)

    def newest_whole(self, listing: RunListing) -> RunStep | None:
        """Return the newest checkpoint of the run that is whole; what is to go may be the rest."""
        for step in reversed(listing.line):
            try:
                self.run.check_whole(step.name)
            except (Corrupt, NotCommitted) as error:
                logger.warning("%s", error)
            else:
                return step
        return None

    def known(
        self, step: RunStep, *, may_write: bool = True, is_fresh: bool = False
    ) -> KnownStep | None:
        """Return what there is to know of a checkpoint; None if it is damaged, and left alone."""
        try:
            return self.run.known(step, may_write=may_write, is_fresh=is_fresh)
        except (Corrupt, NotCommitted) as error:
            logger.warning("%s", error)
            return None

    def cut(self, base: str, needing: Iterable[str]) -> None:
        """Write anew what some checkpoints, the newest first, have in a base, and delete that."""
        for name in needing:
            self.detach(name)
            logger.info("%s does not refer to %s any more", name, base)
        self.delete(base)

    def detach(self, name: str, on_progress: Callable[[], None] = lambda: None) -> None:
        """Write anew what a checkpoint has in others."""
        from ..detaching import detach  # loads torch

        made = detach(self.run.store.substore(name), on_progress=lambda _, __: on_progress())
        self.run.detached(name, made.save_id)

    def abandon(self, names: Iterable[str]) -> None:
        """Mark the checkpoints that the run has gone back from, as far as they are here."""
        here = {step.name for step in self.run.look().steps}
        for name in here.intersection(names):
            self.run.mark(name, ABANDONED)
            logger.warning(
                "%s: the run has gone back to an earlier checkpoint and on from there; this one is "
                "not continued from any more",
                self.run.store.substore(name).url,
            )

    def collect(self) -> None:
        """Delete what saves and deletions that died have left, and complete what they had to do."""
        listing = self.run.look()
        spared = self.spare()
        for name in listing.dead:
            if name in spared:  # somebody goes on with what was interrupted
                continue
            for gone in clean(self.run.store.substore(name), older_than=self.leftovers_after):
                logger.info("collected %s/%s of a dead save", name, gone)
            self.run.sweep(name)
        self.run.store.delete(name for name in listing.stray if self.run.is_ours(name))
        for step in listing.steps:
            if not step.is_recorded:
                self.known(step)


class Worker:
    """A thread that does one thing after the other, and logs what fails."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def do(self, task: Callable[[], object]) -> None:
        """Do something later, after what was asked before; from any thread."""
        with self._lock:
            if self._thread is None:
                # A daemon: an interpreter that ends does not wait for what can be done again.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(task)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except CheckpointError as error:
                logger.warning("upkeep of a run: %s", error)
            except Exception:
                logger.exception("upkeep of a run failed")

    def wait(self, tick: Callable[[], None] = lambda: None, within: float = math.inf) -> bool:
        """Wait until all that was asked so far is done; ``tick`` is called now and then.

        Returns whether it is done; after ``within`` seconds it is not waited for any longer.
        """
        with self._lock:
            if self._thread is None:
                return True
            done = threading.Event()
            self._queue.put(done.set)
        limit = time.monotonic() + within
        while not done.wait(min(_TICK_SECONDS, max(limit - time.monotonic(), 0.0))):
            if time.monotonic() >= limit:
                return False
            tick()
        return True

    def close(self, within: float | None = None) -> None:
        """Do what was asked so far and end; after some seconds no longer wait for that."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._queue.put(None)
        thread.join(within)
