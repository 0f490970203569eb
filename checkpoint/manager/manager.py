"""``CheckpointManager``: one object that saves, keeps, finds and restores the steps of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, SupportsIndex, Unpack, cast

from dtckpt.errors import CheckpointError, NotCommitted

from ...storage.base import Store
from ...storage.open import open_store
from ..agreement.gate import Agreed
from ..compression.choosing import Compress
from ..loading.report import LoadReport
from ..ranks.together import DEFAULT_TIMEOUT
from ..runs.keep import EVERYTHING, Best, Keep
from ..runs.places import Places, Sighted, Tier, known_everywhere
from ..runs.run import PIN, Run, RunStep
from ..saving.finishing import SaveReport
from ..saving.handle import SaveHandle
from ..saving.job import CheckReplicas
from ..state.tree import GiveState, State, is_stateful
from ..timing.observers import Occasion, OnCost, tell_cost
from .deciding import Tick, decided
from .due import Due
from .emergency import Emergency
from .promotion import Promotions
from .requests import OnSignals, Requests, is_first
from .restoring import LoadChoices, no_such_step, restore_newest, search
from .saves import Failures, Manner, OnFailure, Saves, Wanted
from .when import EVERY_STEP, When, look_at_the_clock, rules_of


class CheckpointManager:
    """Saves the steps of a run under ``root`` and finds the one to go on from.

    Every rank of ``process_group`` (default: the default group; without one, or with ``no_dist``,
    this process alone) makes one with the same arguments and calls the same methods in the same
    order. Each checkpoint is an ordinary one, at ``root/step-N``, or ``root/{prefix}N``: ``prefix``
    also says which checkpoints of a run that others have begun are its own.

    ``when`` says at which calls of ``save`` something is saved: a rule or several, of which one is
    enough. ``keep`` says what stays; the newest checkpoint always does, and so does one to whose
    files others refer. With ``in_background`` a save returns once what this rank writes has been
    copied, on as many ranks that hold it as ``staged_copies`` says (see ``async_save``); with
    ``spread`` that is copied while the training goes on. ``incremental`` is how many
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
    the newest checkpoint of all places, from the fastest that has it; from the first call of
    ``save`` on that is brought to ``root`` as well, if the process before had not come to it. A
    tier that is lost costs no more than what had not come to ``root``. ``keep`` is for ``root``;
    each tier has its own.

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
        staged_copies: int = 1,
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
        compress: Compress = None,
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
        group = {"process_group": process_group, "no_dist": no_dist, "timeout": timeout}
        self._group = group
        self._places = Places(
            open_store(root, **dict(storage_options or {})),
            keep,
            tiers,
            [open_store(place) for place in elsewhere],
            prefix=prefix,
            leftovers_after=leftovers_after,
            spare=lambda: [*map(self._places.first.run.name_of, self._saves.needed())],
        )
        self._keep = keep
        self._on_failure: OnFailure = on_failure
        self._on_cost = on_cost
        self._is_first = is_first(group)
        self._shows = progress and self._is_first
        self._failures: Failures = []
        self._promotions = Promotions(
            self._places,
            group,
            on_failure=lambda step, error: self._failures.append((step, error)),
            timeout=timeout,
        )
        self._requests = Requests(
            group,
            by_clock=look_at_the_clock(rules := rules_of(when)),
            on_signals=on_signals,
            root=self._places.durable.run.store,
            on_demand=on_demand,
        )
        self._emergency = Emergency() if on_signals is None else on_signals.emergency
        self._due = Due(rules, self._requests.agreement)
        manner = Manner(
            group=group,
            timeout=timeout,
            is_first=self._is_first,
            in_background=in_background,
            spread=spread,
            incremental=incremental,
            on_failure=on_failure,
            on_cost=on_cost,
            progress=self._shows,
            choices={
                "allow_pickle": allow_pickle,
                "check_replicas": check_replicas,
                "compress": compress,
                "staged_copies": staged_copies,
            },
        )
        self._saves = Saves(
            self._places, self._promotions, self._due, self._requests, manner, self._failures
        )
        self._is_stopping = False
        self._ending: Agreed | None = None
        self._is_closed = False

    # -- saving

    def save(
        self,
        step: int,
        state: State | GiveState,
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
            raise CheckpointError(f"{self._places.first.url}: this manager is closed; make another")
        self._saves.bring_on_restored()
        reason = self._due.is_due(step, is_durable=self.saving is None, is_first=self._is_first)
        if reason is None and not force:
            return False
        ending = self._requests.ends_with(reason)
        saves = self._saves
        try:
            if ending is None:
                if not saves.settle():
                    return False
            elif not saves.make_room(ending, self._emergency):
                return False
            if saves.last is not None and step <= saves.last:
                if step == saves.last:
                    return False
                raise ValueError(f"steps count up: {step} comes after {saves.last}")
            wanted = Wanted(
                step=step,
                state=_giving(state),
                metrics=metrics,
                metadata=metadata,
                is_forced=force,
                ending=ending,
            )
            return saves.begin(wanted)
        finally:
            if ending is not None:
                self._is_stopping, self._ending = True, ending
                self._requests.raise_held()

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
            found = by.of(known_everywhere(sighted) for sighted in line.values())
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

        if step == self._saves.step:
            self._saves.settle()
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
        self._saves.settle()
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
        self._saves.go_on_from(restored.step, restored.report.url)
        self._due.restored(restored.step)
        tell_cost(self._on_cost, restored.report.costs, Occasion("restore", restored.step))
        return restored.report

    # -- the end

    @property
    def saving(self) -> SaveHandle | None:
        """The save that is under way in the background, if any."""
        return self._saves.handle

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
        self._saves.settle(is_alone=True)
        self._await_promotions()
        self._places.wait()
        return self._saves.report

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
                self._saves.settle(is_alone=True)
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


def _giving(state: State | GiveState) -> GiveState:
    """Return what gives a state; one that can be called itself, as a module can, is none of it."""
    if callable(state) and not is_stateful(state):
        return state
    given = cast(State, state)
    return lambda: given


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
