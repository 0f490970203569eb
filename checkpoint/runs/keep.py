"""Which checkpoints of a run stay; a pure choice among what is known of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The checkpoints with the smallest or largest value of a metric.

    Those without the metric, or with NaN, are never among the best. Of equal ones the newer counts
    as better.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"the mode of Best is 'min' or 'max', got {self.mode!r}")
        if self.count < 1:
            raise ValueError(f"Best keeps at least one checkpoint, got count={self.count!r}")

    def of(self, steps: Iterable[KnownStep]) -> list[KnownStep]:
        """Return the best of some checkpoints, the best first."""
        sign = 1 if self.mode == "min" else -1
        found = [
            (sign * value, -step.number, step)
            for step in steps
            if not math.isnan(value := step.metrics.get(self.metric, math.nan))
        ]
        return [step for _, _, step in sorted(found, key=lambda item: item[:2])[: self.count]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What stays: a checkpoint that any of these asks for. All stay where none is given.

    Beside them stay the newest one, those that are pinned, and those to whose files others refer
    that stay.
    """

    last: int | None = None
    """So many of the newest."""
    every: int | None = None
    """Those whose step is a multiple of it."""
    best: Best | None = None
    younger_than: timedelta | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and value < 1:
                raise ValueError(f"Keep({name}=...) is a number above 0, got {value!r}")

    @property
    def is_all(self) -> bool:
        """Whether nothing is ever to go."""
        return self == EVERYTHING


EVERYTHING = Keep()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """What there is to know of a committed checkpoint when it is decided whether it stays."""

    number: int
    name: str
    saved_at: float
    """In seconds since 1970."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    bases: frozenset[str] = frozenset()
    """Names of the checkpoints beside it to whose files it refers."""
    is_pinned: bool = False
    is_abandoned: bool = False
    """Whether the run has gone back to an earlier one and on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """What need not stay."""

    free: tuple[str, ...]
    """Names of checkpoints that may go now; those that refer to others come before these."""
    lent: Mapping[str, tuple[str, ...]]
    """Names of those that may not go yet, and of those that stay and refer to their files."""
    cut: tuple[str, ...] = ()
    """Those of ``lent`` that would stay for very long: no save to come refers to them, and all that
    do are kept whatever follows."""


def surplus(steps: Sequence[KnownStep], keep: Keep, *, now: float) -> Surplus:
    """Return which of a run's committed checkpoints need not stay at the time ``now``.

    >>> steps = [KnownStep(number=n, name=f"step-{n}", saved_at=0) for n in range(1, 8)]
    >>> surplus(steps, Keep(last=2, every=3), now=0).free
    ('step-5', 'step-4', 'step-2', 'step-1')
    """
    line = sorted((s for s in steps if not s.is_abandoned), key=lambda step: step.number)
    wanted = {step.name for step in steps if step.is_pinned}
    wanted.update(step.name for step in (line if keep.is_all else _wanted(line, keep, now)))
    wanted.update(step.name for step in line[-1:])
    if keep.is_all or not line:  # what was abandoned is the only good one while nothing follows it
        wanted.update(step.name for step in steps)
    lasting = {step.name for step in steps if step.is_pinned}
    lasting.update(
        step.name for step in _wanted(line, replace(keep, last=None, younger_than=None), now)
    )
    newest_first = sorted(steps, key=lambda step: (step.number, step.saved_at), reverse=True)
    rest = [step for step in newest_first if step.name not in wanted]
    needing: dict[str, list[str]] = {}
    for step in newest_first:
        if step.name in wanted:
            for base in step.bases:
                needing.setdefault(base, []).append(step.name)
    lent = {step.name: tuple(needing[step.name]) for step in rest if step.name in needing}
    newest = {step.name for step in line[-1:]}
    return Surplus(
        free=tuple(step.name for step in rest if step.name not in needing),
        lent=lent,
        cut=tuple(
            name for name, by in lent.items() if lasting.issuperset(by) and not newest & {*by}
        ),
    )


def _wanted(line: Sequence[KnownStep], keep: Keep, now: float) -> Iterable[KnownStep]:
    """Yield what the rules ask for, of the run's own checkpoints from the oldest to the newest."""
    if keep.last is not None:
        yield from line[-keep.last :]
    if keep.best is not None:
        yield from keep.best.of(line)
    for step in line:
        if keep.every is not None and step.number % keep.every == 0:
            yield step
        age = timedelta(seconds=now - step.saved_at)
        if keep.younger_than is not None and age < keep.younger_than:
            yield step
