"""All collectives of a job are compared where the environment says so."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ..comm.traffic import EVERYWHERE, Collective, Observer, add_observer

if TYPE_CHECKING:
    from .checking import CollectiveChecker

CHECK_VARIABLE = "DTCKPT_CHECK_COLLECTIVES"
"""Environment variable that has all collectives compared across ranks."""


class _EnvironmentChecker(Observer):
    """Checks all threads of a process, from the time on at which its job has a store.

    Made of light stuff: most processes never come to a collective.
    """

    def __init__(self) -> None:
        self._checkers: dict[int, CollectiveChecker] = {}
        self._lock = threading.RLock()

    def before(self, collective: Collective) -> None:
        """Compare a collective, by the rank that this one has in its group."""
        from ..torch_private import job_store
        from .checking import CollectiveChecker, timeout_of_environment

        timeout, store = timeout_of_environment(), job_store()
        if store is None:  # ranks that are threads, without a job
            return
        rank = collective.ranks[collective.rank]
        with self._lock:
            if not self._checkers:
                atexit.register(self._leave)
            checker = self._checkers.setdefault(rank, CollectiveChecker(store, timeout))
        checker.before(collective)

    def _leave(self) -> None:
        for checker in self._checkers.values():
            with suppress(Exception):  # the store may have gone with the job
                checker.leave("ended")


def check_if_asked() -> None:
    """Have all collectives of this process checked if the environment says so."""
    if _is_set(os.environ.get(CHECK_VARIABLE, "")):
        add_observer(_EnvironmentChecker(), EVERYWHERE)


def _is_set(value: str) -> bool:
    if value in ("", "0", "1"):
        return value == "1"
    raise ValueError(f"{CHECK_VARIABLE} is 0 or 1, got {value!r}")
