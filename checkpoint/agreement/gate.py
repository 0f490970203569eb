"""The calls of the training thread: counted, and held for the moment in which all ranks agree."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from dtckpt.errors import RankFailed


@dataclass(frozen=True, slots=True)
class Agreed:
    """Why all ranks save at one call."""

    reasons: tuple[str, ...]
    """What asked for it, on any rank, in the order of the ranks."""
    limit: float | None = None
    """When it should be over, by this process's ``time.monotonic()``; None if it may take long."""

    def __str__(self) -> str:
        return ", ".join(self.reasons)

    def seconds_left(self) -> float | None:
        """Return how long it may still take; None if as long as it likes."""
        return None if self.limit is None else max(self.limit - time.monotonic(), 0.0)

    def joined(self, other: Agreed) -> Agreed:
        """Return what stands for both."""
        limits = [limit for limit in (self.limit, other.limit) if limit is not None]
        return Agreed(tuple(dict.fromkeys(self.reasons + other.reasons)), min(limits, default=None))


class CallGate:
    """Counts calls; one thread calls, another one holds the next call and lets go of it.

    A rank says which call is its next one only while it holds it: so none has gone past the highest
    of those numbers when all have said theirs, and all can meet there.
    """

    def __init__(self, patience: float) -> None:
        """``patience`` is for how many seconds a call is held if nobody lets go of it."""
        self._patience = patience
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._next = 0
        self._is_held = False
        self._due: dict[int, Agreed] = {}
        self._error: RankFailed | None = None
        self._is_open = False
        """Whether nothing is held, due or to be told; not before the first call."""
        self.thread = 0
        """The thread that calls."""

    @property
    def is_held(self) -> bool:
        """Whether a call would have to wait."""
        return self._is_held

    def enter(self) -> Agreed | None:
        """Count a call, and return why all ranks save at it if they do.

        Raises RankFailed if there was something to agree on and that has failed. Waits while the
        call is held.
        """
        with self._lock:
            if self._is_open:
                self._next += 1
                return None
            return self._enter_slowly()

    def _enter_slowly(self) -> Agreed | None:
        self.thread = threading.get_ident()
        limit = time.monotonic() + self._patience
        while self._is_held:
            left = limit - time.monotonic()
            if left <= 0:
                self._is_held = False
                self._error = RankFailed(
                    f"the ranks have not agreed within {self._patience:g} s on the call at which "
                    "they save: the store of the process group does not answer. Is the process "
                    "that hosts it stopped?"
                )
                break
            self._changed.wait(left)
        call = self._next
        self._next += 1
        agreed = self._due.pop(call, None)
        error = self._error
        if agreed is None:  # else the others save here, and it is told at the next call
            self._error = None
        self._is_open = not self._due and self._error is None
        if agreed is None and error is not None:
            raise error
        return agreed

    def hold(self) -> int:
        """Hold the next call, and return its number."""
        with self._lock:
            self._is_held, self._is_open = True, False
            return self._next

    def is_due(self, reason: str) -> bool:
        """Whether a call that is still to come has been agreed on for this reason, too."""
        with self._lock:
            return any(reason in agreed.reasons for agreed in self._due.values())

    def overdue(self, now: float) -> Agreed | None:
        """Return what should have been over by now and has not begun."""
        with self._lock:
            for agreed in self._due.values():
                if agreed.limit is not None and agreed.limit < now:
                    return agreed
        return None

    def let_go(self, call: int | None = None, agreed: Agreed | None = None) -> None:
        """Let the held call go on; ``call`` is the one that has been agreed on, if any has."""
        with self._lock:
            if call is not None and agreed is not None:
                if call >= self._next:
                    before = self._due.get(call)
                    self._due[call] = before.joined(agreed) if before else agreed
                else:  # it had waited in vain before
                    self._error = RankFailed(
                        f"the ranks have agreed to save ({agreed}) at a call that this rank had "
                        "made when it gave up waiting for them"
                    )
            self._settle()

    def fail(self, error: RankFailed) -> None:
        """Let the held call go on, and have the next one raise."""
        with self._lock:
            self._error = error
            self._settle()

    def _settle(self) -> None:
        self._is_held = False
        self._is_open = self._is_open and not self._due and self._error is None
        self._changed.notify_all()
