"""Looking at a run again and again while it saves: what there is, and what has changed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Literal

from dtckpt.errors import ObjectNotFound

from ...storage.base import Level, ObjectInfo, Store
from ..files.places import MANIFEST, record_path
from .overview import StepOverview, look_at, marked, names_of_steps, with_dependents

What = Literal[
    "saving", "progress", "committed", "damaged", "pinned", "unpinned", "abandoned", "deleted"
]

_NUM_REQUESTS = 16
_FEW_SAVES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one time."""

    url: str
    at: float
    """In seconds since 1970, by the clock of this machine."""
    steps: tuple[StepOverview, ...]
    bytes_per_second: Mapping[str, float] = field(default_factory=dict[str, float])
    """At which checkpoints that are being saved have grown since the look before, by name."""

    @property
    def newest(self) -> StepOverview | None:
        """The newest committed checkpoint that the run has not gone back from."""
        return next(iter(self._newest_first()), None)

    @property
    def seconds_between(self) -> float | None:
        """Of the last few saves, from the end of one to that of the next: the median."""
        times = [s.saved_at for s in self._newest_first() if s.saved_at is not None][:_FEW_SAVES]
        gaps = [later - earlier for later, earlier in pairwise(times)]
        return statistics.median(gaps) if gaps else None

    @property
    def expected_bytes(self) -> int | None:
        """How large a checkpoint is here that refers to no other one, going by the newest."""
        newest = self.newest
        return None if newest is None else newest.own_bytes + newest.borrowed_bytes

    def _newest_first(self) -> list[StepOverview]:
        line = [s for s in self.steps if s.state == "committed" and not s.is_abandoned]
        return line[::-1]


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a checkpoint between two looks."""

    what: What
    step: StepOverview
    """As it is now; as it was, if it was deleted."""


class RunWatch:
    """Looks at a run as often as it is asked; what is committed is read once.

    A look costs one listing of one level, a request for each checkpoint without a record, and for
    those that are new or not committed what ``look_over`` costs.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[ObjectInfo, StepOverview]] = {}
        """Committed ones by name, and what tells that nothing has become of them since."""
        self._before: RunView | None = None

    def look(self) -> RunView:
        """Return what there is now. StorageError where the storage cannot be looked at."""
        level = self._store.level()
        names = names_of_steps(level)
        found: list[StepOverview | None] = []
        if names:
            with ThreadPoolExecutor(min(_NUM_REQUESTS, len(names)), "dtckpt-watch") as pool:
                found = list(pool.map(partial(self._look_at, level), names))
        for name in self._known.keys() - set(names):
            del self._known[name]
        steps = with_dependents(step for step in found if step is not None)
        view = RunView(url=self._store.url, at=time.time(), steps=steps)
        self._before = view = replace(view, bytes_per_second=_speeds(self._before, view))
        return view

    def _look_at(self, level: Level, name: str) -> StepOverview | None:
        witness = self._witness(level, name)
        known = self._known.get(name)
        if known is not None and known[0] == witness:
            return marked(known[1], level)
        step = look_at(self._store, level, name)
        if witness is not None and step is not None and step.state == "committed":
            self._known[name] = witness, step
        return step

    def _witness(self, level: Level, name: str) -> ObjectInfo | None:
        """Return what changes with every save of this name; None where there is no such thing."""
        record = record_path(name)
        beside = next((info for info in level.objects if info.name == record), None)
        if beside is not None:
            return beside
        try:
            return self._store.substore(name).stat(MANIFEST)
        except ObjectNotFound:
            return None


def _speeds(before: RunView | None, view: RunView) -> dict[str, float]:
    if before is None or view.at <= before.at:
        return {}
    sizes = {step.name: step.own_bytes for step in before.steps if step.state == "incomplete"}
    return {
        step.name: max(0, step.own_bytes - sizes[step.name]) / (view.at - before.at)
        for step in view.steps
        if step.state == "incomplete" and step.name in sizes
    }


def changes(before: RunView, after: RunView) -> Iterator[Change]:
    """Yield what has become of the checkpoints of a run, by number; of those deleted first."""
    olds = {step.name: step for step in before.steps}
    news = {step.name for step in after.steps}
    yield from (Change("deleted", step) for step in before.steps if step.name not in news)
    for step in after.steps:
        old = olds.get(step.name)
        is_other = old is None or (old.state, old.saved_at) != (step.state, step.saved_at)
        if step.state == "incomplete":
            if old is None or old.state != "incomplete":
                yield Change("saving", step)
            elif old.own_bytes != step.own_bytes:
                yield Change("progress", step)
        elif is_other:
            yield Change(step.state, step)
        if step.is_pinned != (old is not None and old.is_pinned):
            yield Change("pinned" if step.is_pinned else "unpinned", step)
        if step.is_abandoned and (old is None or not old.is_abandoned):
            yield Change("abandoned", step)
