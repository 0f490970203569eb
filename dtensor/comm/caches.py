"""A bounded memory that costs nothing to read."""

from __future__ import annotations

import itertools
import threading
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class HalvingDict(dict[K, V]):
    """A dict of at most ``limit`` entries whose older half goes when there would be more.

    Many threads may read and ``put`` at once. Reading takes no lock and moves nothing, unlike in a
    dict that drops what was used longest ago.

    >>> memory = HalvingDict(4)
    >>> for number in range(5):
    ...     memory.put(number, str(number))
    >>> list(memory)
    [2, 3, 4]
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._lock = threading.RLock()  # a signal handler may come in between

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry."""
        with self._lock:
            if len(self) >= self.limit and key not in self:
                for old in list(itertools.islice(self, self.limit - self.limit // 2)):
                    self.pop(old, None)
            self[key] = value
