"""``CheckpointManager``: one object that saves, keeps, finds and restores the steps of a run."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex, Unpack

from dtckpt.errors import (
    AlreadyCommitted,
    Busy,
    CheckpointError,
    LayoutMismatch,
    NotCommitted,
    Unsavable,
)
from dtckpt.logs import logger_of

from ...storage.base import Store
from ...storage.open import open_store
from ..agreement.gate import Agreed
from ..loading.report import LoadReport
from ..ranks.together import DEFAULT_TIMEOUT, Ranks, closing, ranks_of, together
from ..runs.keep import EVERYTHING, Best, Keep
from ..runs.places import Places, Sighted, Tier
from ..runs.record import StepRecord
from ..runs.run import PIN, Run, RunStep
from ..runs.upkeep import Upkeep
from ..saving.background import Background, begin_save
from ..saving.handle import SaveHandle
from ..saving.job import CheckReplicas, SaveOptions, SaveReport
from ..saving.saver import save
from ..state.tree import Stateful
from ..timing.bars import watch
from ..timing.observers import Occasion, OnCost, tell_cost
from .deciding import Tick, decided
from .due import Due
from .emergency import Emergency, agree_on_way, report_in_time
from .line import begin, make_way
from .promotion import Promotions, Ticket
from .requests import OnSignals, Requests, is_first
from .restoring import LoadChoices, no_such_step, restore_newest, search
from .when import EVERY_STEP, When, look_at_the_clock, rules_of

logger = logger_of("checkpoint")

State = Mapping[Any, Any] | Stateful
OnFailure = Literal["raise", "warn"]

_HOPELESS = (Unsavable, LayoutMismatch)
"""Errors of saves that the next one will have as well."""


class CheckpointManager:
    """Saves the steps of a run under ``root`` and finds the one to go on from.

    Every rank of ``process_group`` (default: the default group; without one, or with ``no_dist``,
    this process alone) makes one with the same arguments and calls the same methods in the same
    order. Each checkpoint is an ordinary one, at ``root/step-N``.

    ``when`` says at which calls of ``save`` something is saved: a rule or several, of which one is
    enough. ``keep`` says what stays; the newest checkpoint always does, and so does one to whose
    files others refer. With ``in_background`` a save returns once what this rank writes has been
    copied; with ``spread`` that is copied while the training goes on. ``incremental`` is how many
    saves in a row may refer to what has not changed since an earlier one instead of writing it; the
    next one writes everything anew.

    ``elsewhere`` are other roots, of which the next is taken for a save where the storage of the
    first place fails; of several tiers the next one is. What is there is found again like the rest.

    ``on_failure`` says what becomes of a save that fails for reasons that may pass, such as a full
    disk, a store that does not answer or a rank that died: ``"raise"``, where it is in the
    background at the next call, or ``"warn"`` and go on, so that the next save is tried as if
    nothing had happened (``failures`` tells of it). A state that cannot be saved at all raises in
    either case.

    ``on_signals`` saves at signals, on whichever rank they come, and all ranks save the same step:
    at SIGUSR1 and goes on; at SIGTERM in the time that is left, after which ``stopping`` is true
    and the loop is to end. ``on_demand`` looks in the root, every five seconds or as often as it
    says, for what ``request_save`` of another process leaves there. The save comes at the next call
    that all ranks can agree on; until something asks for one a call costs nothing.

    ``tiers`` are faster places, from the fastest on: a save goes to the first one, and once it is
    committed there it is brought to the others and at last to ``root``, in the background and
    verified. Where that takes longer than the time between two saves the newest goes on and those
    between are left out, but for saves by ``force`` and steps of ``keep.every``. ``restore`` takes
    the newest checkpoint of all places, from the fastest that has it. A tier that is lost costs no
    more than what had not come to ``root``. ``keep`` is for ``root``; each tier has its own.

    What saves that died have left is deleted when the run begins, if nothing of it was written to
    for ``leftovers_after``. ``on_cost(costs, occasion)`` is called on every rank with what each
    save and restore has cost, in the thread that ends it; its errors are logged. With ``progress``
    the first rank shows bars of saves in the background and of restores, where its stderr is a
    terminal. Other options are those of ``save``.

    A context manager: leaving it waits for the save under way.

    >>> import tempfile, torch
    >>> from dtckpt.checkpoint import EverySteps
    >>> state = {"w": torch.zeros(2), "step": 0}
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with CheckpointManager(root, when=EverySteps(2), keep=Keep(last=2)) as manager:
    ...         for step in range(1, 8):
    ...             state["step"] = step
    ...             _ = manager.save(step, state)
    ...     with CheckpointManager(root) as manager:
    ...         report = manager.restore(state)
    ...         manager.all_steps(), state["step"]
    ((4, 6), 6)
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        when: When | Iterable[When] = EVERY_STEP,
        keep: Keep = EVERYTHING,
        tiers: Sequence[Tier] = (),
        elsewhere: Sequence[str | os.PathLike[str] | Store] = (),
        in_background: bool = True,
        spread: bool = False,
        incremental: int = 0,
        on_failure: OnFailure = "raise",
        on_signals: OnSignals | None = None,
        on_demand: bool | timedelta = False,
        leftovers_after: timedelta = timedelta(days=1),
        prefix: str = "step-",
        process_group: Any = None,
        no_dist: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        storage_options: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        check_replicas: CheckReplicas = None,
        on_cost: OnCost | None = None,
        progress: bool = False,
    ) -> None:
        if on_failure not in ("raise", "warn"):
            raise ValueError(f"on_failure is 'raise' or 'warn', got {on_failure!r}")
        if incremental < 0:
            raise ValueError(f"incremental is a number of saves, got {incremental!r}")
        if tiers and incremental:
            raise ValueError(
                "incremental saves do not go with tiers: the checkpoints that they refer to need "
                "not be in every place. Leave out one of the two"
            )
        self._places = Places(
            open_store(root, **dict(storage_options or {})),
            keep,
            tiers,
            [open_store(place) for place in elsewhere],
            prefix=prefix,
            leftovers_after=leftovers_after,
            spare=lambda: [self._run.name_of(step) for step in self._promotions.steps()],
        )
        self._run = self._places.first.run
        """Where saves go."""
        self._keep = keep
        self._in_background = in_background
        self._incremental = incremental
        self._on_failure: OnFailure = on_failure
        self._timeout = timeout
        self._group: dict[str, Any] = {
            "process_group": process_group,
            "no_dist": no_dist,
            "timeout": timeout,
        }
        self._promotions = Promotions(
            self._places,
            self._group,
            on_failure=lambda step, error: self._failures.append((step, error)),
            timeout=timeout,
        )
        self._spread = spread
        self._on_cost = on_cost
        self._shows = progress and is_first(self._group)
        self._choices: dict[str, Any] = {
            "allow_pickle": allow_pickle,
            "check_replicas": check_replicas,
        }
        self._requests = Requests(
            self._group,
            by_clock=look_at_the_clock(rules := rules_of(when)),
            on_signals=on_signals,
            root=self._places.durable.run.store,
            on_demand=on_demand,
        )
        self._emergency = Emergency() if on_signals is None else on_signals.emergency
        self._due = Due(rules, self._requests.agreement)
        self._is_first = is_first(self._group)
        self._is_stopping = False
        self._answers: tuple[str, ...] = ()
        """Requests of other processes that the save under way is for."""
        self._began = 0.0
        self._has_begun = False
        self._is_closed = False
        self._restored: int | None = None
        self._in_the_way: set[str] = set()
        """Names of checkpoints that the run has gone back from, once it has begun."""
        self._ending: Agreed | None = None
        self._handle: SaveHandle | None = None
        self._tended: SaveHandle | None = None
        self._lock = threading.Lock()
        self._underway: int | None = None
        """Step of the save that nobody has asked for the end of."""
        self._metrics: Mapping[str, float] = {}
        self._last: int | None = None
        """Step of the last save that succeeded, or of the checkpoint that was restored."""
        self._base: int | None = None
        self._num_referring = 0
        """How many saves in a row refer to earlier ones, up to now."""
        self._report: SaveReport | None = None
        self._failures: list[tuple[int, CheckpointError]] = []

    # -- saving

    def save(
        self,
        step: int,
        state: State | Callable[[], State],
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
        force: bool = False,
    ) -> bool:
        """Save ``state`` as that of ``step`` if it is time, or with ``force``; return whether.

        All ranks call it at every step, or at the same ones, with their part of the state as of
        ``save``, or a function that gives it and is called only if there is something to save.
        Steps count up; one that is saved already, or was restored, is not saved again. ``metrics``
        are kept beside the checkpoint, for ``best``; those of the first rank count.

        The error of a save in the background is raised at the next one, if ``on_failure`` says so.
        AlreadyCommitted if the run holds this step or a later one and was not restored: a run that
        begins anew by mistake overwrites nothing.
        """
        step, metrics = _checked(step, metrics or {})
        if self._is_closed:
            raise CheckpointError(f"{self._run.store.url}: this manager is closed; make another")
        reason = self._due.is_due(step, is_durable=self.saving is None, is_first=self._is_first)
        if reason is None and not force:
            return False
        ending = self._requests.ends_with(reason)
        try:
            if ending is None:
                if not self._settle():
                    return False
            elif not self._make_room(ending):
                return False
            if self._last is not None and step <= self._last:
                if step == self._last:
                    return False
                raise ValueError(f"steps count up: {step} comes after {self._last}")
            return self._save(step, state, metrics, metadata, ending, is_forced=force)
        finally:
            if ending is not None:
                self._is_stopping, self._ending = True, ending
                self._requests.raise_held()

    def _save(
        self,
        step: int,
        state: State | Callable[[], State],
        metrics: Mapping[str, float],
        metadata: Any,
        ending: Agreed | None,
        *,
        is_forced: bool,
    ) -> bool:
        self._underway = step
        try:
            self._begin(step)
        except AlreadyCommitted:
            self._underway = None
            raise
        except CheckpointError as error:
            self._failed(error)
            return False
        try:
            self._due.begun()
            self._answers = self._requests.begin_save()
            self._start(step, state, metrics, metadata, ending, is_forced=is_forced)
        except CheckpointError as error:
            self._failed(error)
        if ending is not None:
            self._settle(ending)
        return step in (self._underway, self._last)

    def _make_room(self, ending: Agreed) -> bool:
        """Deal with the save under way when the process is about to be ended.

        Returns whether there is time for another one.
        """
        with closing(ranks := ranks_of(**self._group, purpose="emergency")):
            way = agree_on_way(ranks, self._handle, self._began, ending, self._emergency)
        if way == "supersede" and self._handle is not None:
            self._handle.cancel()
        self._settle(ending, is_quiet=True)
        return way != "finish"

    def _start(
        self,
        step: int,
        state: State | Callable[[], State],
        metrics: Mapping[str, float],
        metadata: Any,
        ending: Agreed | None,
        *,
        is_forced: bool,
    ) -> None:
        target = self._run.place_of(step)
        base = self._base if self._num_referring < self._incremental else None
        options: dict[str, Any] = {
            **self._choices,
            "metadata": metadata,
            "base": None if base is None else self._run.place_of(base),
            "elsewhere": [place.run.place_of(step) for place in self._places.for_want],
        }
        self._num_referring = 0 if base is None else self._num_referring + 1
        given = _Deferred(state) if callable(state) else state
        if ending is not None:
            left = timedelta(seconds=max(ending.seconds_left() or 0.0, 1.0))
            options |= {"timeout": min(left, self._timeout)}
        is_urgent = is_forced or ending is not None or bool(self._answers)
        ticket = self._promotions.announce(step, must=is_urgent, replaces=False)
        try:
            if ending is None and not self._in_background:
                report = save(given, target, **self._group | options)
                self._succeeded(report, metrics)
                tell_cost(self._on_cost, report.costs, Occasion("save", step))
                self._promotions.begin(ticket, report.url)
                return
            self._metrics, self._began = metrics, time.monotonic()
            self._handle = self._save_in_background(given, target, options, ticket, ending)
            self._handle.add_done_callback(self._tend_once)
            self._handle.add_done_callback(partial(self._tell_cost, step))
        except BaseException:
            self._promotions.withdraw(ticket)
            raise
        if self._shows:
            watch(f"saving {self._run.name_of(step)}", self._handle.standing)

    def _save_in_background(
        self,
        state: State,
        target: Store,
        options: Mapping[str, Any],
        ticket: Ticket | None,
        ending: Agreed | None,
    ) -> SaveHandle:
        def promote(handle: SaveHandle, ranks: Ranks) -> None:
            self._tend_once(handle)
            self._promotions.bring(ticket, ranks, handle.url)

        def withdraw_if_failed(handle: SaveHandle) -> None:
            if handle.report is None:
                self._promotions.withdraw(ticket)

        way = Background(
            at_exit="wait" if ending is None else "abort",
            spread=self._spread and ending is None,
            afterwards=None if ticket is None else promote,
        )
        chosen: dict[str, Any] = {"timeout": self._timeout, **options}
        group = {**self._group, "timeout": chosen["timeout"]}
        ranks = ranks_of(**group, purpose="async_save")
        handle = begin_save(ranks, state, target, SaveOptions(**chosen), way)
        handle.add_done_callback(withdraw_if_failed)
        return handle

    def _is_at_first_place(self, report: SaveReport | None) -> bool:
        """Whether a save was made where saves go, and not elsewhere for want of it."""
        root = f"{self._run.store.url.rstrip('/')}/"
        return report is not None and report.url.startswith(root)

    def _tell_cost(self, step: int, handle: SaveHandle) -> None:
        if (report := handle.report) is not None:
            tell_cost(self._on_cost, report.costs, Occasion("save", step))

    def _tend_once(self, handle: SaveHandle) -> None:
        """Do what follows a commit; called as soon as it is done, and when that is waited for.

        The one may come before the other, and whoever waits is to find all of it begun.
        """
        with self._lock:
            step, report = self._underway, handle.report
            if handle is self._tended or step is None:
                return
            self._tended = handle
            if report is not None:
                self._tend(report, step, self._metrics)
            else:
                self._answer(problem=str(handle.error))

    def _tend(self, report: SaveReport, step: int, metrics: Mapping[str, float]) -> None:
        """Do what is to be done for the run after a commit; on one rank, in the background."""
        if not self._is_first:
            return
        record = StepRecord(
            step=step,
            save_id=report.save_id,
            saved_at=time.time(),
            bases=report.bases,
            total_bytes=report.total_bytes,
            metrics=metrics,
        )
        here = self._places.of(step, report.url)
        self._answer(report.url)
        here.worker.do(lambda: here.run.write_record(record))
        here.worker.do(here.upkeep.retain)

    def _answer(self, url: str = "", problem: str = "") -> None:
        """Tell those who have asked for the save that was under way what has become of it."""
        answers, self._answers = self._answers, ()
        if answers:
            self._places.durable.worker.do(lambda: self._requests.answer(answers, url, problem))

    def _settle(
        self, ending: Agreed | None = None, *, is_quiet: bool = False, is_alone: bool = False
    ) -> bool:
        """Wait for the save under way, and learn how it ended; call it off when time is over.

        Returns whether it has: where it hangs on some rank, all go on without it for now, if
        ``on_failure`` says so. ``is_quiet`` notes a failure and raises none. ``is_alone`` asks no
        other rank, which may not come: this one may be leaving by an error of its own.
        """
        handle = self._handle
        if handle is None:
            return True
        error: BaseException | None = None
        try:
            if is_alone and ending is None:
                error = handle.outcome(self._timeout)
            elif ending is None:
                self._wait_together(handle)
                error = handle.error
            else:
                report_in_time(handle, ending)
        except Busy as hangs:
            if self._on_failure == "raise":
                raise
            logger.warning("no save is made for now: %s", hangs)
            return False
        except Exception as found:
            error = found
        self._handle = None
        self._tend_once(handle)
        if error is None:
            self._ended_well(handle.result())
        elif isinstance(error, CheckpointError):
            self._failed(error, is_quiet=is_quiet)
        else:
            raise error
        return True

    def _wait_together(self, handle: SaveHandle) -> None:
        """Wait for a save on all ranks; the same Busy on all where it hangs on one."""

        def wait() -> bytes:
            handle.outcome(self._timeout, ranks.tell_alive)
            return b""

        with closing(ranks := ranks_of(**self._group, purpose="end of a save")):
            together(ranks, "wait for the save before", wait)

    def _succeeded(self, report: SaveReport, metrics: Mapping[str, float]) -> None:
        if self._underway is not None:
            self._tend(report, self._underway, metrics)
        self._ended_well(report)

    def _ended_well(self, report: SaveReport) -> None:
        self._last = self._underway
        self._base = self._underway if self._is_at_first_place(report) else None
        self._report = report
        self._underway = None

    def _failed(self, error: CheckpointError, *, is_quiet: bool = False) -> None:
        step, self._underway = self._underway, None
        self._answer(problem=str(error))
        self._base = None  # whatever was wrong, the next one stands on its own
        if step is not None:
            self._failures.append((step, error))
        if not is_quiet and (self._on_failure == "raise" or isinstance(error, _HOPELESS)):
            raise error
        logger.error("the save of step %s failed, and the run goes on without it: %s", step, error)

    def _begin(self, step: int) -> None:
        """See, before a save, that this run may write to its place, and that the place is free."""
        root, name = self._places.url, self._run.name_of(step)
        if not self._has_begun:
            self._promotions.wait()  # or what is brought meanwhile would not be seen

            def look(tick: Tick) -> bytes:
                return json.dumps(begin(self._places, self._restored, step, tick)).encode()

            self._in_the_way = set(json.loads(decided(self._group, "begin the run", root, look)))
            self._has_begun = True
            if self._is_first:
                self._places.do(Upkeep.collect)
        if name in self._in_the_way:

            def clear(tick: Tick) -> bytes:
                make_way(self._places, name, tick)
                return b""

            decided(self._group, "make way", root, clear)
            self._in_the_way.discard(name)

    # -- what the run holds; every rank asks, one looks

    def all_steps(self) -> tuple[int, ...]:
        """Return the steps of all committed checkpoints, oldest first.

        Costs one listing of one level. Those that the run has gone back from are left out.
        """
        return tuple(json.loads(self._ask(list)))

    def latest(self) -> int | None:
        """Return the newest step whose checkpoint is whole; None if the run holds none at all.

        Corrupt if there are checkpoints and none is whole.
        """
        found = search(self._places.runs, self._look, None).found
        return None if found is None else found.step

    def best(self, best: Best | None = None) -> int | None:
        """Return the step with the best metric, by default that of ``keep``; None if none has it.

        ValueError if no metric is named.
        """
        best = best or self._keep.best
        if best is None:
            raise ValueError("best() needs to know by what: best(Best(metric=...))")
        by = best

        def choose(line: Mapping[int, Sequence[Sighted]]) -> int | None:
            found = by.of(run.known(step) for (run, step), *_ in line.values())
            return found[0].number if found else None

        return json.loads(self._ask(choose))

    def set_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a checkpoint that is there, of an evaluation that ended later, say."""
        self._change(step, lambda run, found: run.set_metrics(found, metrics))

    def pin(self, step: int, *, is_pinned: bool = True) -> None:
        """Keep a checkpoint whatever ``keep`` says, or no longer do."""
        self._change(step, lambda run, found: run.mark(found.name, PIN, is_set=is_pinned))

    def _ask(self, ask: Callable[[Mapping[int, Sequence[Sighted]]], Any]) -> bytes:
        return self._look(lambda: json.dumps(ask(self._places.line())).encode())

    def _look(self, look: Callable[[], bytes]) -> bytes:
        """Return on every rank what one sees that looks at the run."""

        def look_after_the_rest(tick: Tick) -> bytes:
            self._places.wait(tick)  # records are about to be written
            return look()

        return decided(self._group, "look at the run", self._places.url, look_after_the_rest)

    def _change(self, step: int, change: Callable[[Run, RunStep], None]) -> None:
        def find_and_change() -> bytes:
            steps = self._places.change(step, change)
            if step not in steps:
                raise no_such_step(self._places.durable.run, step, steps)
            return b""

        if step == self._underway:
            self._settle()
        self._look(find_and_change)

    # -- going on

    def restore(
        self, state: State, step: int | None = None, **choices: Unpack[LoadChoices]
    ) -> LoadReport:
        """Fill ``state`` from the newest checkpoint that is whole, or that of ``step``.

        Where that turns out to be damaged as it is read, the one before is taken, and so on; the
        report says which were ``passed_over`` and why. After that the whole state has been filled
        from one checkpoint. ``choices`` are those of ``load``.

        NotCommitted if the run holds no checkpoint, or none of ``step``, Corrupt if none is whole,
        or that of ``step`` is not. The run goes on from what was restored: once it has saved, later
        checkpoints are not continued from any more.
        """
        report = self._restore(state, step, choices)
        if report is None:
            raise NotCommitted(
                f"{self._places.durable.url}: the run holds no checkpoint to restore. Check the "
                "root; restore_if_any starts a run that holds none"
            )
        return report

    def restore_if_any(self, state: State, **choices: Unpack[LoadChoices]) -> LoadReport | None:
        """Do what ``restore`` does; return None where the run holds no checkpoint at all.

        Only for a root that could be looked at: damaged checkpoints, or a store that does not
        answer, raise, so that a run never begins anew by mistake.
        """
        return self._restore(state, None, choices)

    def _restore(self, state: State, step: int | None, choices: LoadChoices) -> LoadReport | None:
        self._settle()
        restored = restore_newest(
            self._places.runs,
            self._look,
            state,
            step,
            self._group,
            choices,
            progress=self._shows,
        )
        if restored is None:
            return None
        self._restored = self._last = restored.step
        self._base, self._has_begun = None, False
        tell_cost(self._on_cost, restored.report.costs, Occasion("restore", restored.step))
        return restored.report

    # -- the end

    @property
    def saving(self) -> SaveHandle | None:
        """The save that is under way in the background, if any."""
        handle = self._handle
        return None if handle is None or handle.done() else handle

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked the run to stop; what can be saved of it has been."""
        return self._is_stopping

    @property
    def failures(self) -> tuple[tuple[int, CheckpointError], ...]:
        """Steps whose saves failed, or did not come to ``root``, and why, since this was made."""
        return tuple(self._failures)

    def wait(self) -> SaveReport | None:
        """Wait for the save under way, and what follows it; return the report of the last save.

        Raises what it failed with, if ``on_failure`` says so; also where the last one is in the
        first tier and has not come to ``root``.
        """
        self._settle(is_alone=True)
        self._await_promotions()
        self._places.wait()
        return self._report

    def _await_promotions(self) -> None:
        self._promotions.wait()
        error, self._promotions.lacking = self._promotions.lacking, None
        if error is not None and self._on_failure == "raise":
            raise error

    def close(self) -> None:
        """Wait for the save under way and what follows it, and end; errors as of ``wait``."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            try:
                self._settle(is_alone=True)
            finally:
                self._await_promotions()
        finally:
            self._places.close(None if self._ending is None else self._ending.seconds_left())
            self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as second:
            if error is None:
                raise
            error.add_note(f"and the save in the background failed: {second}")


def _checked(step: object, metrics: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the number of a step and metrics as they are kept; ValueError for what is none."""
    number = -1
    if isinstance(step, SupportsIndex) and not isinstance(step, bool):
        number = step.__index__()
    if number < 0:
        raise ValueError(f"a step is a whole number from 0 on, got {step!r}")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"metrics are numbers, got {value!r} for {name!r}") from None
    return number, found


class _Deferred:
    """A state that is asked for once all ranks take part in the save, so that errors are shared."""

    def __init__(self, give: Callable[[], State]) -> None:
        self._give = give

    def state_dict(self) -> dict[Any, Any]:
        """Return the state."""
        state = self._give()
        return dict(state) if isinstance(state, Mapping) else state.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Never called: what is saved is not loaded."""
        raise NotImplementedError
