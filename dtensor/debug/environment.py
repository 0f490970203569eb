"""All collectives of a job are compared where the environment says so."""

from __future__ import annotations

import os
import threading

from ..comm.traffic import EVERYWHERE, Collective, Observer, add_observer

CHECK_VARIABLE = "DTCKPT_CHECK_COLLECTIVES"
"""Environment variable that has all collectives compared across ranks."""


class _CheckerOfEnvironment(Observer):
    """Checks every collective; made of light stuff, since most processes never come to one."""

    def __init__(self) -> None:
        self._checker: Observer | None = None
        self._lock = threading.RLock()

    def before(self, collective: Collective) -> None:
        with self._lock:
            if self._checker is None:
                from .checking import EnvironmentChecker

                self._checker = EnvironmentChecker()
        self._checker.before(collective)


def check_if_asked() -> None:
    """Have all collectives of this process checked if the environment says so."""
    if _is_set(os.environ.get(CHECK_VARIABLE, "")):
        add_observer(_CheckerOfEnvironment(), EVERYWHERE)


def _is_set(value: str) -> bool:
    if value in ("", "0", "1"):
        return value == "1"
    raise ValueError(f"{CHECK_VARIABLE} is 0 or 1, got {value!r}")
