"""Where objects are: which agents hold the newest of each name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import StorageError, not_found
from .agent.generations import parent
from .client import Peer
from .crew import Crew

_KNOWN_SECONDS = 1.0
"""For so long it is believed where an object lies that can only be made once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an object is, as its agents have told."""

    key: str
    """Its name among all of the job."""
    size: int
    stamp: int
    """Of several objects of a name the newest has the greatest one."""
    is_fixed: bool
    """Whether it can only be made once."""
    peers: tuple[Peer, ...]
    """Who holds it, the agent of this host first."""

    @property
    def modified(self) -> float:
        """When it was written, in seconds since 1970: that is what stamps count, in nanoseconds."""
        return self.stamp / 1e9


class Places:
    """What the agents of a job hold; any thread may use it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._known: dict[str, tuple[Place, float]] = {}

    def find(self, key: str) -> Place | None:
        """Return where an object is now; None if no agent that answers holds it."""
        place = self._told("look", directory=parent(key)).get(key)
        if place is None:
            self._known.pop(key, None)
        return place

    def known(self, key: str) -> Place | None:
        """Return where an object is, or was a moment ago if it can only be made once.

        All that lies in the same directory is known by the same questions.
        """
        place, until = self._known.get(key, (None, 0.0))
        return place if time.monotonic() < until else self.find(key)

    def below(self, prefix: str) -> list[Place]:
        """Return all objects below a directory, by name."""
        found = self._told("list", prefix=prefix)
        return [found[key] for key in sorted(found)]

    def forget(self, key: str) -> None:
        """Ask again for an object when it is needed."""
        self._known.pop(key, None)

    def missing(self, where: str, lost: Sequence[StorageError] = ()) -> StorageError:
        """Return the error for an object that no agent holds, with the agents that are missing."""
        why = "".join(f"; {error}" for error in lost)
        return not_found(where, why or self._crew.silent())

    def _told(self, op: str, **fields: Any) -> dict[str, Place]:
        answers = self._crew.ask_all(op, **fields)
        found: dict[str, Place] = {}
        for peer in sorted(answers, key=lambda peer: not peer.is_own):
            for key, size, stamp, is_fixed in answers[peer]["objects"]:
                there = found.get(key)
                if there is not None and there.stamp > stamp:
                    continue
                others = there.peers if there is not None and there.stamp == stamp else ()
                found[key] = Place(
                    key=key,
                    size=size,
                    stamp=stamp,
                    is_fixed=is_fixed,
                    peers=(*others, peer),
                )
        until = time.monotonic() + _KNOWN_SECONDS
        self._known.update({k: (place, until) for k, place in found.items() if place.is_fixed})
        return found
