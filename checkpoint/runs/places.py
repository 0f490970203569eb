"""The places of a run: fast ones that may be lost, and the durable one that they lead to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ...storage.base import Store
from ...storage.open import open_store, split_target
from ..saving.exiting import forget
from .finding import listings
from .keep import Keep, KnownStep
from .run import PIN, Run, RunStep
from .upkeep import Upkeep, Worker

_PEERS = "peers://"
_ALL_OF_THEM = 1 << 30
"""Checkpoints that agents keep: what is to go is for the run to say, which knows what is still to
be brought to another place."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A place that is faster than the root of a run, such as memory or a disk of the cluster.

    All ranks have to see the same objects there: ``peers://job`` is such a place, and so is a disk
    that hosts share; the local disks of several hosts are none.
    """

    root: str | os.PathLike[str] | Store
    keep: Keep = Keep(last=1)  # noqa: RUF009  frozen
    """What stays there, beside what is still to be brought to the next place."""
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def open(self) -> Store:
        """Return the store."""
        options = dict(self.storage_options)
        if not isinstance(self.root, Store) and split_target(self.root)[0].startswith(_PEERS):
            options.setdefault("keep", _ALL_OF_THEM)
        return open_store(self.root, **options)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One of them, and what is done for it in the background."""

    run: Run
    upkeep: Upkeep
    worker: Worker

    @property
    def url(self) -> str:
        """Its root."""
        return self.run.store.url


Sighted = tuple[Run, RunStep]
"""A checkpoint in one place."""


class Places:
    """The places of a run: the way from the fastest to the durable one, and others for want."""

    def __init__(
        self,
        root: Store,
        keep: Keep,
        tiers: Sequence[Tier],
        elsewhere: Sequence[Store] = (),
        *,
        prefix: str,
        leftovers_after: timedelta,
        spare: Callable[[], Collection[str]],
    ) -> None:
        """``spare`` names the checkpoints that no place on the way may lose yet.

        What could not be saved to the first place may be ``elsewhere``, where ``keep`` holds, too.
        """

        def place(store: Store, keep: Keep, spared: Callable[[], Collection[str]]) -> Place:
            run = Run(store, prefix)
            upkeep = Upkeep(run=run, keep=keep, leftovers_after=leftovers_after, spare=spared)
            return Place(run, upkeep, Worker("dtckpt-upkeep"))

        ways = [*((tier.open(), tier.keep) for tier in tiers), (root, keep)]
        self.way = [place(store, kept, spare) for store, kept in ways]
        """Where a checkpoint goes, one after the other."""
        self.elsewhere = [place(store, keep, tuple) for store in elsewhere]
        self._lock = threading.Lock()

    @property
    def first(self) -> Place:
        """Where saves go."""
        return self.way[0]

    @property
    def durable(self) -> Place:
        """The root of the run."""
        return self.way[-1]

    @property
    def all(self) -> list[Place]:
        """All places in the order in which they are looked at; the durable one is the last."""
        return [*self.way[:-1], *self.elsewhere, self.way[-1]]

    @property
    def for_want(self) -> list[Place]:
        """Where to save to if the first place fails."""
        return [*self.way[1:], *self.elsewhere]

    @property
    def runs(self) -> list[Run]:
        """The directories of all places."""
        return [place.run for place in self.all]

    def after(self, place: Place) -> list[Place]:
        """Return where a checkpoint goes from a place; nowhere if that is off the way."""
        return self.way[self.way.index(place) + 1 :] if place in self.way else []

    def of(self, step: int, url: str) -> Place:
        """Return the place in which the checkpoint of a step has a URL."""
        return next(
            (place for place in self.all if place.run.place_of(step).url == url), self.first
        )

    @property
    def url(self) -> str:
        """All roots, for ranks to compare."""
        return " and ".join(place.url for place in self.all)

    def line(self) -> dict[int, list[Sighted]]:
        """Return where the checkpoints of each step are, oldest first; one listing per place."""
        found: dict[int, list[Sighted]] = {}
        for place, listing in listings(self.runs):
            for step in listing.line:
                found.setdefault(step.number, []).append((self.runs[place], step))
        return dict(sorted(found.items()))

    def change(self, step: int, change: Callable[[Run, RunStep], None]) -> Sequence[int]:
        """Change what is kept beside the checkpoint of a step, everywhere; return all steps.

        Also where the run has gone back from it: what is pinned there is in the way of a new one.
        """
        steps: set[int] = set()
        with self._lock:
            for place, listing in listings(self.runs):
                steps.update(found.number for found in listing.steps)
                for found in listing.steps:
                    if found.number == step:
                        change(self.runs[place], found)
        return sorted(steps)

    def pass_on_record(self, source: Place, target: Place, step: int) -> None:
        """Put beside a checkpoint what is kept beside it at another place."""
        name = source.run.name_of(step)
        with self._lock:
            record = source.run.record_of(step)
            if record is not None:
                target.run.add_record(record)
            if source.run.store.exists(name + PIN):
                target.run.mark(name, PIN)

    def do(self, task: Callable[[Upkeep], object]) -> None:
        """Have something done at every place later."""
        for place in self.all:
            place.worker.do(lambda place=place: task(place.upkeep))

    def wait(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until all that was to be done is done; ``tick`` is called now and then."""
        for place in reversed(self.all):
            place.worker.wait(tick)

    def close(self, within: float | None = None) -> None:
        """Do what was to be done, and end; after some seconds no longer wait for that."""
        limit = None if within is None else time.monotonic() + within
        for place in reversed(self.all):
            place.worker.close(None if limit is None else max(limit - time.monotonic(), 0.0))
            if limit is not None:
                forget(place.run)  # the end of the process does not wait for it either


def known_everywhere(sighted: Sequence[Sighted]) -> KnownStep:
    """Return what there is to know of a checkpoint, with the metrics that any place has now.

    Those of the last place count where they differ: other processes know that one alone.
    """
    found = [run.known(step, is_fresh=True) for run, step in sighted]
    metrics = {name: value for known in found for name, value in known.metrics.items()}
    return replace(found[0], metrics=metrics)
