"""How ranks agree on a call, step by step.

A *turn* begins when some rank is asked, which moves the turn's word from nothing to "asked". Each
rank looks at the word every now and then, and says that it knows; nobody is held so far. The last
one moves the word to "vote": now each rank holds its next call, and says which that is. The last
one moves the word to the decision: the highest of these calls. A rank that waits too long, or makes
no more calls, moves the word to that effect instead. The word moves in single steps of the store,
so all ranks read the same end of a turn, whatever fails: the same call, or the same error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dtckpt.errors import RankFailed
from dtckpt.logs import logger_of

from ..ranks.group_ranks import standing
from ..ranks.text import ranks_text
from .gate import Agreed, CallGate
from .register import NOTHING, Register

logger = logger_of("checkpoint")

Steps = Generator[float, None, str]
"""Yields the seconds until the next step; returns the word of the turn."""

ASKED, VOTE = "asked", "vote"
_OPEN = (NOTHING, ASKED, VOTE)
_KNOWS = "knows"

_AT_ONCE = 0.0
HELD_SECONDS = 30.0
"""So long at most a call is held for ranks that have just been heard of."""
_MAX_FAILURES = 5
"""So often in a row the store may fail while nothing is asked."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a rank looks, in seconds."""

    poll: float
    """While nothing is asked."""
    timeout: float
    """After so long the ranks that have not answered are given up."""
    size: int
    """How many ranks look."""

    @property
    def brisk(self) -> float:
        """While something is asked: some 20,000 looks a second of all ranks, at most 0.25 s."""
        return min(max(self.size * 5e-5, 0.005), 0.25)


class Voter:
    """One rank's part; it never waits itself."""

    def __init__(
        self,
        register: Register,
        gate: CallGate,
        ranks: tuple[int, ...],
        index: int,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._register = register
        self._gate = gate
        self._ranks = ranks
        self._index = index
        self._pace = pace
        self._clock = clock
        self._turn = 0
        self._requests: dict[str, float | None] = {}
        self._old: list[tuple[int, list[object]]] = []
        """What is left of turns before this one."""
        self._overdue: Agreed | None = None
        self._is_begun = False
        self.is_over = False
        """Whether some rank makes no more calls."""

    @property
    def is_asked(self) -> bool:
        """Whether something is asked, here or on another rank, and has not been decided."""
        return self._is_begun or bool(self._requests)

    def ask(self, reason: str, limit: float | None) -> None:
        """Note that this rank is asked; ``limit`` is when the save should be over, if it must."""
        before = self._requests.get(reason)
        limits = [each for each in (before, limit) if each is not None]
        self._requests[reason] = min(limits, default=None)

    def steps(self) -> Generator[float, None, None]:
        """Take turn after turn; yields for how many seconds there is nothing to do."""
        while not self.is_over:
            word = yield from self._until_asked()
            self._is_begun = True
            if word == ASKED:
                word = yield from self._tell_that_it_knows()
            if word == VOTE:
                word = yield from self._vote()
            self._conclude(json.loads(word))
            yield _AT_ONCE

    def _until_asked(self) -> Steps:
        failures = 0
        while True:
            self._tell_overdue()
            self._requests = {r: t for r, t in self._requests.items() if not self._gate.is_due(r)}
            try:
                if self._requests:
                    return self._register.move(self._turn, NOTHING, ASKED)
                if (word := self._register.word(self._turn)) != NOTHING:
                    return word
                failures = 0
            except RuntimeError:
                failures += 1
                if self._requests or failures == _MAX_FAILURES:
                    raise
            yield self._pace.poll * 2**failures

    def _tell_that_it_knows(self) -> Steps:
        limit = self._limit(self._pace.timeout)
        is_last = self._register.arrive(self._turn, "know") == len(self._ranks)
        yield _AT_ONCE
        if is_last:
            self._register.move(self._turn, ASKED, VOTE)
        else:
            self._register.note(self._turn, self._index, _KNOWS)
        yield _AT_ONCE
        return (yield from self._until_not(ASKED, limit))

    def _vote(self) -> Steps:
        limit = self._limit(min(self._pace.timeout, HELD_SECONDS))
        vote = {
            "call": self._gate.hold(),
            "reasons": list(self._requests),
            "seconds": self._seconds_left(),
        }
        self._register.note(self._turn, self._index, json.dumps(vote))
        yield _AT_ONCE
        if self._register.arrive(self._turn, "vote") == len(self._ranks):
            yield _AT_ONCE
            votes = self._register.notes(self._turn, range(len(self._ranks)))
            yield _AT_ONCE
            self._register.move(self._turn, VOTE, decision(votes))
        yield _AT_ONCE
        return (yield from self._until_not(VOTE, limit))

    def _limit(self, seconds: float) -> float:
        """Return when to give up those who do not answer: a rank after the other does so."""
        left = self._seconds_left()
        patience = seconds if left is None else min(seconds, left)
        return self._clock() + patience + min(0.25 * self._index, 5.0)

    def _seconds_left(self) -> float | None:
        limits = [limit for limit in self._requests.values() if limit is not None]
        return max(min(limits) - self._clock(), 0.0) if limits else None

    def _until_not(self, word: str, limit: float) -> Steps:
        began = self._clock()
        while (found := self._register.word(self._turn)) == word:
            now = self._clock()
            if now >= limit:
                return self._register.move(self._turn, word, self._end_of(word, now - began))
            is_long = now - began > 2 * self._pace.poll
            yield max(self._pace.brisk, self._pace.poll / 4 if is_long else 0.0)
        return found

    def _end_of(self, word: str, seconds: float) -> str:
        """Return the word for a turn that ends because some ranks do not answer."""
        notes = [self._register.note_of(self._turn, i) for i in range(len(self._ranks))]
        missing = [
            rank
            for rank, note in zip(self._ranks, notes, strict=True)
            if not note or (word == VOTE and note == _KNOWS)
        ]
        if not missing:  # only who should have moved the word has not, or does so now
            return VOTE if word == ASKED else decision(notes)
        text = (
            f"{ranks_text(missing)} lost: the ranks could not agree on the call at which they save"
            f"{_because(self._requests)}, since after {seconds:.1f} s there was no answer. Was the "
            "process killed, or stopped?"
        )
        return json.dumps({"failed": text})

    def _conclude(self, told: Mapping[str, Any]) -> None:
        names = ["", "know", "vote"] if self._index == 0 else []
        self._old.append((self._turn, [*names, self._index]))
        self._turn += 1
        self._is_begun = False
        if "call" in told:
            seconds = told["seconds"]
            limit = None if seconds is None else self._clock() + seconds
            self._gate.let_go(told["call"], Agreed(tuple(told["reasons"]), limit))
            self._forget_old()
            self._requests = {r: t for r, t in self._requests.items() if r not in told["reasons"]}
        elif "failed" in told:
            self._requests.clear()
            self._gate.fail(RankFailed(told["failed"]))
        else:
            self._gate.let_go()
            self.is_over = True
            if self._requests:
                logger.warning(
                    "no save%s: rank %s makes no more calls", _because(self._requests), told["over"]
                )
            self._requests.clear()

    def _forget_old(self) -> None:
        # All ranks have voted in the last turn, so none is at one before it.
        for turn, names in self._old[:-1]:
            self._register.forget(turn, names)
        del self._old[:-1]

    def _tell_overdue(self) -> None:
        found = self._gate.overdue(self._clock())
        if found is not None and found is not self._overdue:
            self._overdue = found
            logger.error(
                "the time for the save (%s) is over, and this rank has not come to the call at "
                "which all save%s",
                found,
                standing(self._gate.thread),
            )

    def end(self) -> None:
        """Say that this rank makes no more calls, so that nobody waits for it."""
        over = json.dumps({"over": self._ranks[self._index]})
        while not self.is_over:
            word = self._register.word(self._turn)
            if word in _OPEN:
                word = self._register.move(self._turn, word, over)
            if word not in _OPEN:
                self._conclude(json.loads(word))


def decision(notes: Iterable[str]) -> str:
    """Return the word that says at which call all save, why, and in how many seconds.

    >>> decision(['{"call": 7, "reasons": ["SIGTERM"], "seconds": 25.0}',
    ...           '{"call": 8, "reasons": [], "seconds": null}'])
    '{"call": 8, "reasons": ["SIGTERM"], "seconds": 25.0}'
    """
    votes = [json.loads(note) for note in notes]
    reasons = dict.fromkeys(reason for vote in votes for reason in vote["reasons"])
    seconds = [vote["seconds"] for vote in votes if vote["seconds"] is not None]
    decided = {
        "call": max(vote["call"] for vote in votes),
        "reasons": list(reasons),
        "seconds": min(seconds, default=None),
    }
    return json.dumps(decided)


def _because(requests: Mapping[str, object]) -> str:
    return f" ({', '.join(requests)})" if requests else ""
