"""The number of every save and load over a group, the same on all its ranks."""

from __future__ import annotations

import threading


class Calls:
    """Numbers the calls that this rank makes over a group."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def enter(self) -> int:
        """Return the number of a call that begins; whether it fails or not, it has been one."""
        with self._lock:
            number = self._next
            self._next += 1
        return number

    def skip_to(self, number: int) -> None:
        """Give no number below this one any more."""
        with self._lock:
            self._next = max(self._next, number)
