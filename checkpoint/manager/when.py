"""When a run is saved: rules that look at a step's number, and those that look at the clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol


class When(Protocol):
    """A rule of when to save."""

    def is_step(self, step: int) -> bool:
        """Whether the number of a step alone asks for a save; the same on every rank."""
        ...

    def is_time(self, since_last: float, *, is_durable: bool) -> bool:
        """Whether it is time for a save; only the first rank asks.

        ``since_last`` is in seconds since the last save began, or the run did, and ``is_durable``
        says that none is under way.
        """
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save where the number of a step is a multiple of ``steps``.

    Where ``save`` is not called at every step, at the first call at or after each multiple.

    >>> [step for step in range(1, 10) if EverySteps(4).is_step(step)]
    [4, 8]
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"EverySteps takes a number of steps above 0, got {self.steps!r}")

    def is_step(self, step: int) -> bool:
        """Whether ``step`` is a multiple."""
        return step % self.steps == 0

    def is_time(self, since_last: float, *, is_durable: bool) -> bool:
        """Never."""
        return False


EVERY_STEP = EverySteps(1)


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Save at the next step once so many minutes have passed since the last save began."""

    minutes: float

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"EveryMinutes takes a number above 0, got {self.minutes!r}")

    @classmethod
    def of(cls, interval: timedelta) -> EveryMinutes:
        """Return the rule for an interval."""
        return cls(interval.total_seconds() / 60)

    def is_step(self, step: int) -> bool:
        """Never."""
        return False

    def is_time(self, since_last: float, *, is_durable: bool) -> bool:
        """Whether the minutes have passed."""
        return since_last >= 60 * self.minutes


@dataclass(frozen=True, slots=True)
class Continuously:
    """Save at the next step as soon as the last save is durable."""

    def is_step(self, step: int) -> bool:
        """Never."""
        return False

    def is_time(self, since_last: float, *, is_durable: bool) -> bool:
        """Whether no save is under way."""
        return is_durable


def rules_of(when: When | Iterable[When]) -> tuple[When, ...]:
    """Return one rule or several as a tuple; any of them is enough."""
    return tuple(when) if isinstance(when, Iterable) else (when,)


def look_at_the_clock(rules: Iterable[When]) -> bool:
    """Whether any of the rules may ask for a save that the step's number does not tell."""
    return any(rule.is_time(float("inf"), is_durable=True) for rule in rules)
