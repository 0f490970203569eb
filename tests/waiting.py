"""Waiting for what other threads do, and cases that do nothing else, run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, wraps
from typing import Any


def beside_each_other(body: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> None:
    """Call ``body(*case)`` for all cases at once; raise what they raise, with their cases."""
    listed = list(cases)
    with ThreadPoolExecutor(len(listed)) as pool:
        begun = [(case, pool.submit(body, *case)) for case in listed]
        errors: list[BaseException] = []
        for case, future in begun:
            error = future.exception()
            if error is not None:
                error.add_note(f"in the case {case}")
                errors.append(error)
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(listed)} cases failed", errors)


_waiting: dict[str, dict[str, Callable[[], None]]] = {}
"""Tests that run at the same time, by module and name."""


@cache
def _begun(module: str) -> dict[str, Future[None]]:
    pool = ThreadPoolExecutor(len(_waiting[module]))
    begun = {name: pool.submit(test) for name, test in _waiting[module].items()}
    pool.shutdown(wait=False)
    return begun


def waits(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test that does little but wait: those of a module begin with the first of them.

    It changes nothing that the others see, and has no fixtures.
    """
    _waiting.setdefault(test.__module__, {})[test.__name__] = test

    @wraps(test)
    def result() -> None:
        _begun(test.__module__)[test.__name__].result()

    return result


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until something holds; AssertionError if it does not for long."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


class Clock:
    """A clock for a module's ``time``: only a pause moves it, or the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
