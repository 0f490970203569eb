"""Which checkpoint a run goes on from: the newest that is whole, over all places that it has."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from dtckpt.errors import Corrupt, NotCommitted, StorageError
from dtckpt.logs import logger_of

from ..files.foreign import check_first_start, listed_only, newer_of_other_names
from ..ranks.text import some_names
from .run import Run, RunListing

logger = logger_of("checkpoint")


@dataclass(frozen=True, slots=True, order=True)
class Sighting:
    """A committed checkpoint in one of the places of a run."""

    step: int
    place: int
    """Number of the place, from the fastest on; the last one is the durable one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a search has come to."""

    found: Sighting | None
    passed_over: dict[str, str] = field(default_factory=dict[str, str])
    """Why newer checkpoints, or places, were passed over, by their URLs."""
    steps: tuple[int, ...] = ()
    """All steps that were listed."""

    def to_bytes(self) -> bytes:
        """Return it as the ranks tell it each other."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Finding:
        """Read what ``to_bytes`` has written."""
        told = json.loads(text)
        found = told["found"]
        return cls(
            found=None if found is None else Sighting(**found),
            passed_over=told["passed_over"],
            steps=tuple(told["steps"]),
        )


def find_newest(
    runs: Sequence[Run], step: int | None = None, without: Container[Sighting] = ()
) -> Finding:
    """Return the newest checkpoint whose manifest is intact and whose data files are all there.

    ``step`` asks for one of this number only. Of several places with the same step the first
    counts, but where the run has gone back from it: one that was away may still hold what another
    one has in its stead. Those ``without`` are not looked at. StorageError where the last place
    cannot be looked at; others are then passed over. NotCommitted where no place has anything that
    a run could go on from, but one has what looks like a checkpoint.
    """
    passed_over: dict[str, str] = {}
    sightings: list[Sighting] = []
    left: set[Sighting] = set()
    seen: list[tuple[int, RunListing]] = []
    for place, listing in listings(runs, passed_over):
        seen.append((place, listing))
        steps = listing.line if step is None else listing.steps
        sightings += [Sighting(s.number, place) for s in steps if step in (None, s.number)]
        left.update(Sighting(s.number, place) for s in listing.steps if s.is_abandoned)
    if not any(listing.line for _, listing in seen) and (step is None or not sightings):
        for place, listing in seen:
            _check_first_start(runs[place], listing)
    found = None
    for sighting in sorted(sightings, key=lambda seen: (-seen.step, seen in left, seen.place)):
        run = runs[sighting.place]
        if sighting in without:
            continue
        try:
            run.check_whole(run.name_of(sighting.step))
        except (Corrupt, NotCommitted, StorageError) as error:
            if isinstance(error, StorageError) and sighting.place == len(runs) - 1:
                raise
            url = run.place_of(sighting.step).url
            logger.warning("passing over %s: %s", url, error)
            passed_over[url] = str(error)
        else:
            found = sighting
            _warn_of_newer(run, dict(seen)[sighting.place], sighting.step)
            break
    steps = tuple(sorted({sighting.step for sighting in sightings}))
    return Finding(found=found, passed_over=passed_over, steps=steps)


def _check_first_start(run: Run, listing: RunListing) -> None:
    """Return where a run begins for the first time; NotCommitted or StorageError elsewhere.

    ``listing`` is what the run holds: nothing that it goes on from.
    """
    url = run.store.url
    if listing.steps:
        names = some_names([step.name for step in reversed(listing.steps)])
        raise NotCommitted(
            f"{url}: the run has gone back from all checkpoints that are here ({names}), and the "
            "one that it has gone back to is gone. Restore one of them by its step"
        )
    listed = check_first_start(run.store, run.prefix)
    records = [name for name in listing.stray if name.endswith(".json") and run.is_ours(name)]
    if listed or (records and run.look().steps):  # the first save has ended meanwhile, say
        raise listed_only(url, min(listed or records))
    if records:
        raise NotCommitted(
            f"{url}: {some_names(records)} tells of a checkpoint that was committed here and is "
            "gone. Put it back; delete the record to begin anew"
        )


def _warn_of_newer(run: Run, listing: RunListing, step: int) -> None:
    """Warn of checkpoints with higher numbers whose names are none of the run's."""
    newer = newer_of_other_names(run.store, listing.others, step)
    if newer:
        logger.warning(
            "%s: going on from step %d, though %s is here as well, whose name is not one of %s*",
            run.store.url,
            step,
            newer[0],
            run.prefix,
        )


def listings(
    runs: Sequence[Run], passed_over: dict[str, str] | None = None
) -> Iterator[tuple[int, RunListing]]:
    """Yield what every place holds, with its number; only the last one has to answer."""
    for place, run in enumerate(runs):
        try:
            yield place, run.look()
        except StorageError as error:
            if place == len(runs) - 1:
                raise
            logger.warning("%s cannot be looked at and is passed over: %s", run.store.url, error)
            if passed_over is not None:
                passed_over[run.store.url] = str(error)
