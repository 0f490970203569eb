"""How rows are timed: on sides of this process, or of others beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from ..frame.timing import (
    Batches,
    Comparison,
    Trial,
    noting_failure,
    rotated,
    run_rounds,
    seconds_of,
)
from .rows import ColdRow, WarmRow
from .sides import Side

_NUMBERS = count(1)
"""Numbers of cold shapes, each used once in a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Comparison):
    """What a row took."""

    axes: int
    is_cold: bool


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
                with noting_failure(side.name, self.failed):
                    times[side.name] = seconds_of(self._row.make(side, number))
        return times


def trial_of(row: WarmRow | ColdRow, sides: Sequence[Side], batch_seconds: float) -> Trial:
    """Return a trial of a row in this process."""
    if isinstance(row, ColdRow):
        return ColdTrial(row, sides)
    return Batches({side.name: partial(row.make, side) for side in sides}, batch_seconds)


def measure(
    row: WarmRow | ColdRow, trials: Mapping[str, Trial], rounds: int
) -> dict[str, Measured]:
    """Run rounds of all trials in turn; what a cold call costs first does not count."""
    is_cold = isinstance(row, ColdRow)
    found = {
        place: Measured(name=row.name, axes=row.axes, is_cold=is_cold, bar=row.bar)
        for place in trials
    }
    run_rounds([(trials[place], found[place]) for place in trials], rounds, warm_ups=int(is_cold))
    return found
