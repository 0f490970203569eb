"""How calls are timed: sides in turn, many rounds, and the ratio of each round by itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from statistics import median
from typing import Any, Protocol, TypeVar

from .rows import Call, ColdRow, WarmRow
from .sides import Side

PEER, OURS = "torch", "dtckpt"
_TRIES = 3
_NUMBERS = count(1)
"""Numbers of cold shapes, each used once in a process."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The times of one row, in seconds per call and round."""

    name: str
    axes: int
    is_cold: bool
    bar: float
    times: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Sides that cannot do it, and why."""

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of our time over torch's in the same round."""
        return ratio(self.times.get(OURS), self.times.get(PEER))

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None where there is nothing to compare."""
        return None if self.ratio is None else self.ratio <= self.bar

    def seconds(self, side: str) -> float | None:
        """Return the median time of a call."""
        times = self.times.get(side)
        return median(times) if times else None

    def to_json(self) -> dict[str, Any]:
        """Return everything that was measured, and the verdict."""
        return asdict(self) | {"ratio": self.ratio, "is_met": self.is_met}


def ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> float | None:
    """Return the median of the ratios of single rounds; None where one of the two is missing.

    >>> ratio([1.0, 9.0, 2.0], [2.0, 10.0, 10.0])
    0.5
    """
    if not ours or not theirs:
        return None
    return median(a / b for a, b in zip(ours, theirs, strict=True))


class Trial(Protocol):
    """A row that is ready to be timed on some sides."""

    @property
    def failed(self) -> dict[str, str]:
        """Sides that cannot do it, and why."""
        ...

    def round(self, turn: int) -> dict[str, float]:
        """Time every side once, beginning with another one each turn; seconds of a call."""
        ...


class WarmTrial:
    """Batches of the same call."""

    def __init__(self, row: WarmRow, sides: Sequence[Side], batch_seconds: float) -> None:
        self.failed: dict[str, str] = {}
        self._calls: list[tuple[str, Call, int]] = []
        for side in sides:
            with _noting_failure(side, self.failed):
                call = row.make(side)
                call()
                size = max(1, round(batch_seconds / max(_time(call, _TRIES), 1e-7)))
                self._calls.append((side.name, call, size))

    def round(self, turn: int) -> dict[str, float]:
        """Time a batch of every side."""
        return {name: _time(call, size) for name, call, size in rotated(self._calls, turn)}


class ColdTrial:
    """Single calls on shapes that were never seen."""

    def __init__(self, row: ColdRow, sides: Sequence[Side]) -> None:
        self.failed: dict[str, str] = {}
        self._row, self._sides = row, sides

    def round(self, turn: int) -> dict[str, float]:
        """Time a call of every side on a new shape."""
        number = next(_NUMBERS)
        times: dict[str, float] = {}
        for side in rotated(self._sides, turn):
            if side.name not in self.failed:
                with _noting_failure(side, self.failed):
                    times[side.name] = _time(self._row.make(side, number), 1)
        return times


def trial_of(row: WarmRow | ColdRow, sides: Sequence[Side], batch_seconds: float) -> Trial:
    """Return a trial of a row in this process."""
    if isinstance(row, ColdRow):
        return ColdTrial(row, sides)
    return WarmTrial(row, sides, batch_seconds)


def measure(
    row: WarmRow | ColdRow, trials: Mapping[str, Trial], rounds: int
) -> dict[str, Measured]:
    """Run rounds of all trials in turn; what a cold call costs first does not count."""
    is_cold = isinstance(row, ColdRow)
    found = {
        label: Measured(
            name=row.name, axes=row.axes, is_cold=is_cold, bar=row.bar, failed=trial.failed
        )
        for label, trial in trials.items()
    }
    for turn in range(-1 if is_cold else 0, rounds):
        for label in rotated(list(trials), turn):
            for side, seconds in trials[label].round(turn).items():
                if turn >= 0:
                    found[label].times.setdefault(side, []).append(seconds)
    for measured in found.values():
        for side in measured.failed:
            measured.times.pop(side, None)
    return found


@contextmanager
def _noting_failure(side: Side, failed: dict[str, str]) -> Generator[None]:
    """Within it, whatever a side raises becomes its result."""
    try:
        yield
    except Exception as error:
        first = str(error).partition("\n")[0]
        failed[side.name] = f"{type(error).__name__}: {first}"


def _time(call: Call, size: int) -> float:
    """Return the processor seconds that a call takes, over ``size`` calls in a row.

    Nothing here waits, so this is the time it takes on a machine that does nothing else.
    """
    calls = range(size)
    start = time.process_time()
    for _ in calls:
        call()
    return (time.process_time() - start) / size


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items, beginning with another one each turn."""
    start = turn % max(len(items), 1)
    return [*items[start:], *items[:start]]


@contextmanager
def undisturbed() -> Generator[None]:
    """Keep the garbage collector away, whose pauses would fall on whom they like."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
