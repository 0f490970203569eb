"""The line of steps that a run goes on from, and those that it has gone back from.

A run that has restored an earlier step says so before it saves anything: later checkpoints are
marked as abandoned first, in a round of all ranks, so that no process that comes after ever takes
one of them for the newest. What is to be saved again makes way before its save begins, which then
writes to a place that is free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dtckpt.errors import AlreadyCommitted
from dtckpt.logs import logger_of

from ..files.places import record_path
from ..runs.finding import listings
from ..runs.keep import Keep
from ..runs.places import Place, Places
from ..runs.run import ABANDONED, RunStep
from ..runs.upkeep import Upkeep
from .deciding import Tick, decided

logger = logger_of("checkpoint")


class Line:
    """Where a run goes on from, and whether a step of it may be saved."""

    def __init__(self, places: Places, group: Mapping[str, Any], *, is_first: bool) -> None:
        """``group`` are the arguments of ``ranks_of``."""
        self._places = places
        self._group = group
        self._is_first = is_first
        self._restored: int | None = None
        self._in_the_way: set[str] = set()
        """Names of checkpoints that the run has gone back from, once it has begun."""
        self.has_begun = False

    def go_on_from(self, step: int) -> None:
        """Note that a step was restored: the run begins anew from it, at the next save."""
        self._restored, self.has_begun = step, False

    def clear(self, step: int) -> None:
        """See, before a save, that this run may write to its place, and that the place is free.

        All ranks call it. Raises AlreadyCommitted, or what the storage fails with.
        """
        root, name = self._places.url, self._places.first.run.name_of(step)
        if not self.has_begun:

            def look(tick: Tick) -> bytes:
                return json.dumps(begin(self._places, self._restored, step, tick)).encode()

            self._in_the_way = set(json.loads(decided(self._group, "begin the run", root, look)))
            self.has_begun = True
            if self._is_first:
                self._places.do(Upkeep.collect)
        if name in self._in_the_way:

            def clear(tick: Tick) -> bytes:
                make_way(self._places, name, tick)
                return b""

            decided(self._group, "make way", root, clear)
            self._in_the_way.discard(name)


def begin(places: Places, restored: int | None, step: int, tick: Tick) -> list[str]:
    """Begin to save to a run with ``step``; return the names that have to make way before a save.

    AlreadyCommitted if the run holds this step or a later one and none was restored, or a root is a
    checkpoint itself, in which another one would lie.
    """
    places.wait(tick)
    found = list(listings(places.runs))
    for number, listing in found:
        if listing.is_checkpoint:
            raise AlreadyCommitted(
                f"{places.all[number].url} is a checkpoint itself, not a directory of checkpoints. "
                "Give the directory above it, or another root"
            )
    line = sorted({seen.number for _, listing in found for seen in listing.line})
    if restored is None and line and line[-1] >= step:
        raise AlreadyCommitted(
            f"{places.durable.url} holds checkpoints up to step {line[-1]}, and this run, which is "
            f"to save step {step}, has not restored any of them. Call restore first, or choose "
            "another root"
        )
    if restored is None and line:
        logger.warning(
            "%s holds checkpoints up to step %d, which this run has not restored; they stay",
            places.durable.url,
            line[-1],
        )
    in_the_way: set[str] = set()
    for number, listing in found:
        place = places.all[number]
        later = [s.name for s in listing.line if restored is not None and s.number > restored]
        place.upkeep.abandon(later)
        tick()
        in_the_way.update(later, (seen.name for seen in listing.steps if seen.is_abandoned))
        in_the_way.update(n.removesuffix(ABANDONED) for n in listing.stray if n.endswith(ABANDONED))
        if restored is None:
            place.upkeep.unrestored.update(seen.name for seen in listing.line)
    return sorted(in_the_way)


def make_way(places: Places, name: str, tick: Tick) -> None:
    """Delete what was abandoned under a name that is to be saved to, in all places.

    AlreadyCommitted if it is pinned.
    """
    places.wait(tick)  # or what the upkeep has just listed as abandoned would be the new one
    for number, listing in listings(places.runs):
        place = places.all[number]
        there = next((seen for seen in listing.steps if seen.name == name), None)
        if there is None:
            place.run.store.delete([name + ABANDONED, record_path(name)])
            continue
        if there.is_pinned:
            raise AlreadyCommitted(
                f"{place.url}: {name}, which the run has gone back from, is pinned. Unpin it, or "
                "go on in another root"
            )
        others = [seen for seen in reversed(listing.steps) if seen.name != name]
        _let_go(place, name, others, tick)
        place.run.delete(name)


def _let_go(place: Place, name: str, others: list[RunStep], tick: Tick) -> None:
    """See that no checkpoint refers to the one that is to go; the newest come first."""
    for other in others:
        tick()
        if name not in place.run.known(other).bases:
            continue
        keeps: Keep = place.upkeep.keep
        if other.is_abandoned and not other.is_pinned and not keeps.is_all:
            place.run.delete(other.name)
        else:
            place.upkeep.detach(other.name, tick)
