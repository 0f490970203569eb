"""A row of the benchmark as data: what is measured, on whom, and how good is good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .setting import Setting
from .table import Kind
from .team import Team
from .timing import OURS

Values = dict[str, dict[str, list[float]]]
"""By system, then by metric: one value per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One metric that a row shows of every system."""

    metric: str
    heading: str
    kind: Kind = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A limit on our median of a metric, or on its ratio to another system's."""

    metric: str
    limit: float
    against: str | None = None
    """The system whose median of ``metric`` is the unit; None for an absolute limit."""

    def holds(self, values: Values) -> bool | None:
        """Return whether the limit is kept; None if one of the systems was not measured."""
        measured = self.measure(values)
        return None if measured is None else measured <= self.limit

    def measure(self, values: Values) -> float | None:
        """Return what is to be at most ``limit``; None if one of the systems was not measured."""
        ours = values.get(OURS, {}).get(self.metric)
        if not ours:
            return None
        if self.against is None:
            return median(ours)
        unit = values.get(self.against, {}).get(self.metric)
        return median(ours) / median(unit) if unit and median(unit) else None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a row measured."""

    values: Values = field(default_factory=dict[str, dict[str, list[float]]])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Systems that took no part, and why."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """What else is worth knowing, such as the exact bytes of the state."""

    def divide(self, metric: str, by: float, into: str) -> None:
        """Add a metric to all systems: another one, divided."""
        for values in self.values.values():
            values[into] = [value / by for value in values[metric]]

    def add_rate(self, num_bytes: int) -> None:
        """Add ``bytes_per_second`` to all systems."""
        for values in self.values.values():
            values["bytes_per_second"] = [num_bytes / seconds for seconds in values["seconds"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing to measure. ``run`` is called on every rank of a team of its own size."""

    name: str
    title: str
    what: str
    """How it is measured, with the state of the page cache, in one or two sentences."""
    columns: tuple[Column, ...]
    bars: tuple[Bar, ...]
    systems: tuple[str, ...]
    """All that the row measures or names as skipped."""
    run: Callable[[Team, Setting], Outcome]
    ranks: Callable[[Setting], int] = lambda setting: setting.ranks
    fresh: bool = False
    """Whether the row needs processes in which nothing else has run."""
