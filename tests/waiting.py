"""Waiting for what other threads do, and cases that do nothing else, run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
