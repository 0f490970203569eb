"""One save of a run, from its beginning to what follows its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..runs.places import Places
from ..runs.record import StepRecord
from ..saving.finishing import SaveReport
from ..saving.handle import SaveHandle
from ..timing.observers import Occasion, OnCost, tell_cost
from .requests import Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What a run does once a save has ended; all but telling costs on the first rank only."""

    places: Places
    requests: Requests
    on_cost: OnCost | None
    is_first: bool

    def keep(self, save: StepSave, report: SaveReport) -> None:
        """Tell those who have asked, write the record, and let go of what need not stay."""
        if not self.is_first:
            return
        record = StepRecord(
            step=save.step,
            save_id=report.save_id,
            saved_at=time.time(),
            bases=report.bases,
            total_bytes=report.total_bytes,
            metrics=save.metrics,
        )
        here = self.places.of(save.step, report.url)
        self.answer(save, url=report.url)
        here.run.note(record)
        here.worker.do(here.upkeep.retain)

    def answer(self, save: StepSave, *, url: str = "", problem: str = "") -> None:
        """Tell those who have asked for a save what has become of it."""
        if save.asked_by:
            self.places.durable.worker.do(lambda: self.requests.answer(save.asked_by, url, problem))

    def tell_cost(self, step: int, report: SaveReport) -> None:
        """Tell what a save has cost."""
        tell_cost(self.on_cost, report.costs, Occasion("save", step))


@dataclass(slots=True, eq=False)
class StepSave:
    """The save of one step: begun, perhaps under way in the background, ended."""

    step: int
    metrics: Mapping[str, float]
    asked_by: tuple[str, ...]
    """Requests of other processes that it answers."""
    following: Following
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_ended: bool = False

    def ended(self, report: SaveReport | None, error: BaseException | None) -> None:
        """Do what follows, once, given the report of what is committed, or why nothing is.

        Called as soon as it has ended, and when that is waited for: the one may come before the
        other, and whoever waits is to find all of it begun.
        """
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            if report is not None:
                self.following.keep(self, report)
            else:
                self.following.answer(self, problem=str(error))

    def handle_ended(self, handle: SaveHandle) -> None:
        """Do what follows once a save in the background has ended."""
        self.ended(handle.report, handle.error)

    def tell_cost(self, handle: SaveHandle) -> None:
        """Tell what a save in the background has cost, if it has ended well."""
        if (report := handle.report) is not None:
            self.following.tell_cost(self.step, report)
