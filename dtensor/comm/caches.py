"""What is remembered to be quicker: bounded, cheap to read, and known in one place.

Nothing depends on a cache but time: all of them may be cleared at any moment (``dtckpt.debug``).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakValueDictionary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")
T = TypeVar("T")


class BoundedDict(dict[K, V]):
    """A dict of at most ``limit`` entries whose older half goes when there would be more.

    Many threads may read, ``put`` and ``clear`` at once. Reading takes no lock and moves nothing,
    unlike in a dict that drops what was used longest ago.

    >>> memory = BoundedDict(4)
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

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            super().clear()


class Cache(BoundedDict[K, V]):
    """Results that can be found anew, by what they were found from; ``caches`` lists it."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(limit)
        self.name = name
        _CACHES[id(self)] = self


_CACHES: WeakValueDictionary[int, Cache[Any, Any]] = WeakValueDictionary()
"""Those that are alive, by identity: dicts have no hash."""


@dataclass(frozen=True, slots=True)
class _Results:
    """What is remembered of a function: ``lru_cache`` is a cache of another make."""

    function: Any

    @property
    def name(self) -> str:
        return self.function.__name__

    def __len__(self) -> int:
        return self.function.cache_info().currsize

    def clear(self) -> None:
        self.function.cache_clear()


_RESULTS: list[_Results] = []


def remembered(limit: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Remember ``limit`` results of a function of hashable arguments, those used last."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        made = lru_cache(limit)(function)
        _RESULTS.append(_Results(made))
        return cast("Callable[P, T]", made)

    return decorate


def caches() -> list[Cache[Any, Any] | _Results]:
    """Return all caches that are alive, of all meshes and of the process."""
    found = [reference() for reference in _CACHES.valuerefs()]
    return [*[cache for cache in found if cache is not None], *_RESULTS]
