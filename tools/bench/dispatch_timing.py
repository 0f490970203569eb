"""How calls are timed: sides in turn, many rounds, and the ratio of each round by itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from statistics import median
from typing import Any, TypeVar

from .dispatch_rows import Call, ColdRow, WarmRow
from .dispatch_sides import Side

_PEER, _OURS = "torch", "dtckpt"
_TRIES = 3
_NUMBERS = count(1)
"""Numbers of cold shapes, each used once in a process."""


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

    @contextmanager
    def noting_failure(self, side: Side) -> Generator[None]:
        """Within it, whatever a side raises becomes its result."""
        try:
            yield
        except Exception as error:
            self.failed[side.name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self.times.pop(side.name, None)

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of our time over torch's in the same round."""
        ours, theirs = self.times.get(_OURS), self.times.get(_PEER)
        if not ours or not theirs:
            return None
        return median(a / b for a, b in zip(ours, theirs, strict=True))

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


def measure_warm(
    row: WarmRow, sides: Sequence[Side], rounds: int, batch_seconds: float
) -> Measured:
    """Time batches of the same call, the sides in turn."""
    measured = Measured(name=row.name, axes=row.axes, is_cold=False, bar=row.bar)
    calls: dict[str, Call] = {}
    sizes: dict[str, int] = {}
    for side in sides:
        with measured.noting_failure(side):
            call = row.make(side)
            call()
            sizes[side.name] = max(1, round(batch_seconds / max(_time(call, _TRIES), 1e-7)))
            calls[side.name] = call
    with _undisturbed():
        for turn in range(rounds):
            for name in _rotated(list(calls), turn):
                measured.times.setdefault(name, []).append(_time(calls[name], sizes[name]))
    return measured


def measure_cold(row: ColdRow, sides: Sequence[Side], rounds: int) -> Measured:
    """Time single calls on new shapes, the sides in turn, after one that does not count."""
    measured = Measured(name=row.name, axes=row.axes, is_cold=True, bar=row.bar)
    with _undisturbed():
        for turn in range(-1, rounds):
            number = next(_NUMBERS)
            for side in _rotated(sides, turn):
                if side.name in measured.failed:
                    continue
                with measured.noting_failure(side):
                    seconds = _time(row.make(side, number), 1)
                    if turn >= 0:
                        measured.times.setdefault(side.name, []).append(seconds)
    return measured


def _time(call: Call, size: int) -> float:
    """Return the processor seconds that a call takes, over ``size`` calls in a row.

    Nothing here waits, so this is the time it takes on a machine that does nothing else.
    """
    calls = range(size)
    start = time.process_time()
    for _ in calls:
        call()
    return (time.process_time() - start) / size


T = TypeVar("T")


def _rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items, beginning with another one each turn."""
    start = turn % max(len(items), 1)
    return [*items[start:], *items[:start]]


@contextmanager
def _undisturbed() -> Generator[None]:
    """Keep the garbage collector away, whose pauses would fall on whom they like."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
