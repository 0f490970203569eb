"""Which checkpoint a run goes on from: the newest that is whole, over all places that it has."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from dtckpt.errors import Corrupt, NotCommitted, StorageError
from dtckpt.logs import logger_of

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
    cannot be looked at; others are then passed over.
    """
    passed_over: dict[str, str] = {}
    sightings: list[Sighting] = []
    left: set[Sighting] = set()
    for place, listing in listings(runs, passed_over):
        steps = listing.line if step is None else listing.steps
        sightings += [Sighting(s.number, place) for s in steps if step in (None, s.number)]
        left.update(Sighting(s.number, place) for s in listing.steps if s.is_abandoned)
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
            break
    steps = tuple(sorted({sighting.step for sighting in sightings}))
    return Finding(found=found, passed_over=passed_over, steps=steps)


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
