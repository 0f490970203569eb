"""The saves of a run, one after the other.

    due -> begun -> under way -> ended well
             |          |
             +----------+------> failed

What is due is for ``CheckpointManager`` to say. A save begins once the one before has ended and the
place of its step is free. In the background it is under way until somebody asks how it ended, at
the latest the next save; what follows its commit is done at once (``underway``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from dtckpt.errors import AlreadyCommitted, Busy, CheckpointError, LayoutMismatch, Unsavable
from dtckpt.logs import logger_of

from ...storage.base import Store
from ..agreement.gate import Agreed
from ..ranks.together import Ranks, closing, ranks_of, together
from ..runs.places import Places
from ..saving.background import Background, begin_save
from ..saving.finishing import SaveReport
from ..saving.handle import SaveHandle
from ..saving.job import SaveOptions
from ..saving.saver import save_now
from ..state.tree import GiveState
from ..timing.bars import watch
from ..timing.observers import OnCost
from .due import Due
from .emergency import Emergency, agree_on_way, report_in_time
from .increments import Increments
from .line import Line
from .promotion import Promotions, Ticket
from .requests import Requests
from .underway import Following, StepSave

logger = logger_of("checkpoint")

OnFailure = Literal["raise", "warn"]
Failures = list[tuple[int, CheckpointError]]

_DELETION_SECONDS = 20.0
"""How long a save waits for the deletion of checkpoints that need not stay."""
_HOPELESS = (Unsavable, LayoutMismatch)
"""Errors of saves that the next one will have as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What one call asks to be saved."""

    step: int
    state: GiveState
    metrics: Mapping[str, float]
    metadata: Any
    is_forced: bool
    ending: Agreed | None
    """Why the process is about to end, if that is why it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a run is saved."""

    group: Mapping[str, Any]
    """Arguments of ``ranks_of``."""
    timeout: timedelta
    is_first: bool
    """Whether this rank looks after the run."""
    in_background: bool
    spread: bool
    incremental: int
    on_failure: OnFailure
    on_cost: OnCost | None
    progress: bool
    choices: Mapping[str, Any]
    """Options of every save."""


class Saves:
    """The saves of a run; all ranks call the same methods in the same order."""

    def __init__(
        self,
        places: Places,
        promotions: Promotions,
        due: Due,
        requests: Requests,
        manner: Manner,
        failures: Failures,
    ) -> None:
        """Failures are added to ``failures``."""
        self._places = places
        self._promotions = promotions
        self._due = due
        self._requests = requests
        self._manner = manner
        self._failures = failures
        self._line = Line(places, manner.group, is_first=manner.is_first)
        self._increments = Increments(manner.incremental)
        self._following = Following(
            places=places, requests=requests, on_cost=manner.on_cost, is_first=manner.is_first
        )
        self._underway: tuple[StepSave, SaveHandle] | None = None
        """The save in the background that nobody has asked for the end of."""
        self._restored: tuple[int, str] | None = None
        """Step and URL of what was restored, until it is brought on."""
        self.last: int | None = None
        """Step of the last save that ended well, or of the checkpoint that was restored."""
        self.report: SaveReport | None = None
        """Of the last save that ended well."""

    @property
    def step(self) -> int | None:
        """Step of the save under way, until somebody has asked how it ended."""
        return None if self._underway is None else self._underway[0].step

    @property
    def handle(self) -> SaveHandle | None:
        """The save that is under way in the background, if any."""
        handle = None if self._underway is None else self._underway[1]
        return None if handle is None or handle.done() else handle

    def go_on_from(self, step: int, url: str) -> None:
        """Note that a step was restored from a place."""
        self._line.go_on_from(step)
        self._increments.break_off()
        self.last, self._restored = step, (step, url)

    def needed(self) -> list[int]:
        """Return the steps that are to stay whatever ``keep`` says.

        These are on their way to the root; and before the run has begun it is what was restored,
        since the later steps that it has gone back from are not marked yet.
        """
        restored = [] if self.last is None or self._line.has_begun else [self.last]
        return [*self._promotions.steps(), *restored]

    def bring_on_restored(self) -> None:
        """Bring what was restored to the root, in the background; does nothing when called again.

        Not as it is restored: who only looks at a run writes nothing.
        """
        if self._restored is not None:
            self._promotions.begin_restored(*self._restored)
            self._restored = None

    # -- begun

    def begin(self, wanted: Wanted) -> bool:
        """Begin a save, none being under way; return whether it is under way or has ended well.

        AlreadyCommitted if the step may not be saved; other errors if ``on_failure`` says so. One
        that is made since the process is about to end is waited for.
        """
        step = wanted.step
        try:
            if not self._line.has_begun:
                # What is brought meanwhile would not be seen; what was restored is in nobody's way.
                self._promotions.wait(after=-1 if self.last is None else self.last)
            self._line.clear(step)
            if wanted.ending is None:
                # Saves in a row would otherwise need more space than one checkpoint beside those
                # that stay.
                self._places.first.worker.wait(within=_DELETION_SECONDS)
        except AlreadyCommitted:
            raise
        except CheckpointError as error:
            self._failed(step, error)
            return False
        self._due.begun()
        save = StepSave(step, wanted.metrics, self._requests.begin_save(), self._following)
        try:
            self._start(save, wanted)
        except CheckpointError as error:
            save.ended(None, error)
            self._failed(step, error)
        if wanted.ending is not None:
            self.settle(wanted.ending)
        return step in (self.step, self.last)

    def _start(self, save: StepSave, wanted: Wanted) -> None:
        ending = wanted.ending
        is_urgent = wanted.is_forced or ending is not None or bool(save.asked_by)
        ticket = self._promotions.announce(save.step, must=is_urgent)
        try:
            if ending is None and not self._manner.in_background:
                report = self._save_now(wanted)
                save.ended(report, None)
                self._ended_well(save, report)
                self._following.tell_cost(save.step, report)
                if report.stood_in_for:
                    self._promotions.leave_out(ticket, report.stood_in_for)
                else:
                    self._promotions.begin(ticket, report.url)
                return
            handle = self._begin_in_background(save, wanted, ticket)
        except BaseException:
            self._promotions.withdraw(ticket)
            raise
        self._underway = save, handle
        handle.add_done_callback(save.handle_ended)
        handle.add_done_callback(save.tell_cost)
        if self._manner.progress:
            watch(f"saving {self._places.first.run.name_of(save.step)}", handle.standing)

    def _save_now(self, wanted: Wanted) -> SaveReport:
        target = self._target(wanted)
        ranks = ranks_of(**self._manner.group, purpose="save", target=target)
        return save_now(ranks, wanted.state, target, self._options(wanted))

    def _target(self, wanted: Wanted) -> Store:
        return self._places.first.run.place_of(wanted.step)

    def _options(self, wanted: Wanted) -> SaveOptions:
        base, timeout = self._increments.next_base(), self._manner.timeout
        if wanted.ending is not None:
            left = timedelta(seconds=max(wanted.ending.seconds_left() or 0.0, 1.0))
            timeout = min(left, timeout)
        return SaveOptions(
            metadata=wanted.metadata,
            base=None if base is None else self._places.first.run.place_of(base),
            elsewhere=[place.run.place_of(wanted.step) for place in self._places.for_want],
            timeout=timeout,
            **self._manner.choices,
        )

    def _begin_in_background(
        self, save: StepSave, wanted: Wanted, ticket: Ticket | None
    ) -> SaveHandle:
        def promote(handle: SaveHandle, ranks: Ranks) -> None:
            save.handle_ended(handle)
            if handle.report is not None and handle.report.stood_in_for:
                self._promotions.leave_out(ticket, handle.report.stood_in_for)
            else:
                self._promotions.bring(ticket, ranks, handle.url)

        def withdraw_if_failed(handle: SaveHandle) -> None:
            if handle.report is None:
                self._promotions.withdraw(ticket)

        way = Background(
            at_exit="wait" if wanted.ending is None else "abort",
            spread=self._manner.spread and wanted.ending is None,
            afterwards=None if ticket is None else promote,
        )
        options = self._options(wanted)
        group: dict[str, Any] = {**self._manner.group, "timeout": options.timeout}
        target = self._target(wanted)
        ranks = ranks_of(**group, purpose="async_save", target=target)
        handle = begin_save(ranks, wanted.state, target, options, way)
        handle.add_done_callback(withdraw_if_failed)
        return handle

    # -- ended

    def make_room(self, ending: Agreed, emergency: Emergency) -> bool:
        """Deal with the save under way when the process is about to be ended.

        Returns whether there is time for another one.
        """
        handle = self.handle
        began = 0.0 if self._underway is None else self._underway[0].began
        with closing(ranks := ranks_of(**self._manner.group, purpose="emergency")):
            way = agree_on_way(ranks, handle, began, ending, emergency)
        if way == "supersede" and handle is not None:
            handle.cancel()
        self.settle(ending, is_quiet=True)
        return way != "finish"

    def settle(
        self, ending: Agreed | None = None, *, is_quiet: bool = False, is_alone: bool = False
    ) -> bool:
        """Wait for the save under way, and learn how it ended; call it off when time is over.

        Returns whether it has: where it hangs on some rank, all go on without it for now, if
        ``on_failure`` says so. ``is_quiet`` notes a failure and raises none. ``is_alone`` asks no
        other rank, which may not come: this one may be leaving by an error of its own.
        """
        if self._underway is None:
            return True
        save, handle = self._underway
        error: BaseException | None = None
        try:
            if ending is not None:
                report_in_time(handle, ending)
            elif is_alone:
                error = handle.outcome(self._manner.timeout)
            else:
                self._wait_together(handle)
                error = handle.error
        except Busy as hangs:
            if self._manner.on_failure == "raise":
                raise
            logger.warning("no save is made for now: %s", hangs)
            return False
        except Exception as found:
            error = found
        self._underway = None
        save.ended(handle.report, error)
        if error is None:
            self._ended_well(save, handle.result())
        elif isinstance(error, CheckpointError):
            self._failed(save.step, error, is_quiet=is_quiet)
        else:
            raise error
        return True

    def _wait_together(self, handle: SaveHandle) -> None:
        """Wait for a save on all ranks; the same Busy on all where it hangs on one."""

        def wait() -> bytes:
            handle.outcome(self._manner.timeout, ranks.tell_alive)
            return b""

        with closing(ranks := ranks_of(**self._manner.group, purpose="end of a save")):
            together(ranks, "wait for the save before", wait)

    def _ended_well(self, save: StepSave, report: SaveReport) -> None:
        self.last, self.report = save.step, report
        is_first_place = self._places.of(save.step, report.url) is self._places.first
        if is_first_place and not report.stood_in_for:  # on those that were lost it has failed
            self._increments.saved(save.step)
        else:
            self._increments.break_off()

    def _failed(self, step: int, error: CheckpointError, *, is_quiet: bool = False) -> None:
        self._increments.break_off()  # whatever was wrong, the next one stands on its own
        self._failures.append((step, error))
        is_hopeless = isinstance(error, _HOPELESS)
        if not is_quiet and (self._manner.on_failure == "raise" or is_hopeless):
            raise error
        logger.error("the save of step %s failed, and the run goes on without it: %s", step, error)
