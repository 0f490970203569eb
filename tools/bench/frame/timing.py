"""Calls side by side: in turn, round by round, and the ratio of each round by itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

PEER, OURS = "torch", "dtckpt"
"""The systems whose times make a ratio."""

_TRIES = 3

Call = Callable[[], Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one thing takes on several systems."""

    name: str
    bar: float
    """The most that ``ratio`` may be."""
    times: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Seconds of a call by system, one a round."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Systems that cannot do it, and why."""

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of our time over the peer's in the same round."""
        return ratio(self.times.get(OURS), self.times.get(PEER))

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None where there is nothing to compare."""
        return None if self.ratio is None else self.ratio <= self.bar

    def seconds(self, system: str) -> float | None:
        """Return the median time of a call."""
        times = self.times.get(system)
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


def turns(items: Sequence[T], rounds: int, warm_ups: int = 0) -> Iterator[tuple[int, T]]:
    """Yield the items once a round, each round beginning with another; warm-ups have turns below 0.

    >>> list(turns("ab", 2))
    [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    for turn in range(-warm_ups, rounds):
        yield from ((turn, item) for item in rotated(items, max(turn, 0)))


def rotated(items: Sequence[T], turn: int) -> Sequence[T]:
    """Return the items, beginning with another one each turn."""
    start = turn % max(len(items), 1)
    return [*items[start:], *items[:start]]


def seconds_of(call: Call, calls: int = 1, clock: Callable[[], float] = time.process_time) -> float:
    """Return what a call takes, over so many in a row; what one returned is let go in the next.

    Where nothing waits, the processor's time is what it takes on a machine that does nothing else.
    """
    kept, numbers = None, range(calls)
    start = clock()
    for _ in numbers:
        kept = call()
    seconds = clock() - start
    del kept
    return seconds / calls


@contextmanager
def undisturbed() -> Generator[None]:
    """Keep the garbage collector away, whose pauses would fall on whom they like."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def noting_failure(system: str, failed: dict[str, str]) -> Generator[None]:
    """Within it, whatever a system raises becomes its result."""
    try:
        yield
    except Exception as error:
        first = str(error).partition("\n")[0]
        failed[system] = f"{type(error).__name__}: {first}"


class Trial(Protocol):
    """Something that is ready to be timed on some systems."""

    @property
    def failed(self) -> dict[str, str]:
        """Systems that cannot do it, and why."""
        ...

    def round(self, turn: int) -> dict[str, float]:
        """Time every system once, beginning with another one each turn; seconds of a call."""
        ...


class Batches:
    """Batches of the same call, of a size that takes about ``seconds``."""

    def __init__(self, makers: Mapping[str, Callable[[], Call]], seconds: float) -> None:
        self.failed: dict[str, str] = {}
        self._calls: list[tuple[str, Call, int]] = []
        for name, make in makers.items():
            with noting_failure(name, self.failed):
                call = make()
                call()
                size = max(1, round(seconds / max(seconds_of(call, _TRIES), 1e-7)))
                self._calls.append((name, call, size))

    def round(self, turn: int) -> dict[str, float]:
        """Time a batch of every system."""
        return {name: seconds_of(call, size) for name, call, size in rotated(self._calls, turn)}


def run_rounds(trials: Sequence[tuple[Trial, Comparison]], rounds: int, warm_ups: int = 0) -> None:
    """Run rounds of all trials in turn and put into each comparison what its trial took."""
    for turn, (trial, found) in turns(trials, rounds, warm_ups):
        for system, seconds in trial.round(turn).items():
            if turn >= 0:
                found.times.setdefault(system, []).append(seconds)
    for trial, found in trials:
        found.failed.update(trial.failed)
        for system in trial.failed:
            found.times.pop(system, None)
