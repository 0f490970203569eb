"""How many requests are in flight: fewer while the server says that it is too many."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakValueDictionary

_MOST = 64

# Whatever a server says: nobody is refused a bucket for good because of one odd reply.
_LONGEST_REST = 60.0


@final
class Limit:
    """Requests in flight to one bucket, of all threads of this process together.

    A server that is overrun halves it, every answer that it gives makes it grow again, by one for
    as many answers as are in flight. What is refused in one go counts once.
    """

    def __init__(self, most: int = _MOST, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = now
        self._allowed = float(most)
        self._num_taken = 0
        self._halved_at = self._resume_at = float("-inf")
        self._changed = threading.Condition()

    @property
    def allowed(self) -> int:
        """How many may be in flight now."""
        return int(self._allowed)

    @contextmanager
    def slots(self, wanted: int, seconds: float) -> Generator[int]:
        """Take one slot or more, as many as are free and ``wanted``, and tell how many.

        ``TimeoutError`` if there is none within so many seconds.
        """
        until = self._now() + seconds
        with self._changed:
            while (wait := self._wait()) > 0:
                left = until - self._now()
                if left <= 0:
                    raise TimeoutError("other requests were waited for, as the server is busy")
                self._changed.wait(min(wait, left))
            number = self._take(wanted)
        try:
            yield number
        finally:
            self.give_back(number)

    def take(self, wanted: int) -> int:
        """Take as many slots as are free and ``wanted``, at once; none if there is none."""
        with self._changed:
            return 0 if self._wait() > 0 else self._take(wanted)

    def give_back(self, number: int) -> None:
        """Give back slots that were taken."""
        with self._changed:
            self._num_taken -= number
            self._changed.notify_all()

    def _take(self, wanted: int) -> int:
        number = min(wanted, self.allowed - self._num_taken)
        self._num_taken += number
        return number

    def _wait(self) -> float:
        """How long to wait before there may be a free slot."""
        if self._num_taken >= self.allowed:
            return float("inf")
        return self._resume_at - self._now()

    def answered(self) -> None:
        """Say that the server has done what it was asked for."""
        with self._changed:
            self._allowed = min(self._most, self._allowed + 1 / self._allowed)
            self._changed.notify_all()

    def refused(self, asked_at: float, retry_after: float | None) -> None:
        """Say that a request of that time was refused as one too many, and when to come again."""
        with self._changed:
            now = self._now()
            if asked_at >= self._halved_at:
                self._allowed = max(1.0, self._allowed / 2)
                self._halved_at = now
            self._resume_at = max(self._resume_at, now + min(retry_after or 0.0, _LONGEST_REST))


# By process, too: a lock may have been held when it was forked.
_limits: WeakValueDictionary[tuple[int, int, str], Limit] = WeakValueDictionary()


_SERVERS = (
    *("endpoint_url", "endpoint", "base_url", "account_host", "account_name"),
    "service_account_key",  # which may name a server
)
"""Storage options that say where a bucket is."""


def limit_of(bucket: str, options: Mapping[str, Any]) -> Limit:
    """Return the limit of all connections that this process has to a bucket."""
    given: dict[str, Any] = {**(options.get("client_kwargs") or {}), **options}
    place = next((str(given[name]) for name in _SERVERS if given.get(name)), "")
    return _limits.setdefault((os.getpid(), hash(place), bucket), Limit())
