"""Numbers that have to agree: what weights, data and schedules say of how far a job has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtckpt.errors import LayoutMismatch, Unsavable


class Counters:
    """Numbers that count the same, from different parts of a job; put it in the state.

    Each is a function without arguments. A save at which they differ raises Unsavable before
    anything is written; and once a load has filled everything else they have to be what they were
    at the save, or it raises LayoutMismatch: a loader that stands elsewhere than the weights is
    found before it has given a batch.

    >>> progress = {"step": 3}
    >>> counters = Counters(step=lambda: progress["step"], schedule=lambda: 4)
    >>> counters.state_dict()
    Traceback (most recent call last):
    dtckpt.errors.Unsavable: parts of the job have not come equally far: schedule=4, step=3
    """

    comes_last = True

    def __init__(self, **counts: Callable[[], int]) -> None:
        if not counts:
            raise ValueError("Counters() has nothing to compare; give functions by name")
        self._counts = counts

    def state_dict(self) -> dict[str, int]:
        """Return what all count; Unsavable where they differ."""
        found = self._found()
        if len(set(found.values())) > 1:
            raise Unsavable(f"parts of the job have not come equally far: {_told(found)}")
        return {"count": next(iter(found.values()))}

    def state_template(self) -> dict[str, int]:
        """Return the form of the state."""
        return {"count": 0}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Compare; LayoutMismatch where some number is not what it was at the save."""
        found = self._found()
        if set(found.values()) != {state_dict["count"]}:
            raise LayoutMismatch(
                f"at the save all parts of the job had come to {state_dict['count']}; loaded are "
                f"{_told(found)}. Load all of them from one checkpoint"
            )

    def _found(self) -> dict[str, int]:
        return {name: _whole(name, count()) for name, count in self._counts.items()}


def _whole(name: str, count: Any) -> int:
    """Return a count as an int; a share of a batch would be cut off, and not be found."""
    if int(count) != count:
        raise Unsavable(f"Counters({name}=...) compares whole numbers, got {count!r}")
    return int(count)


def _told(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={count}" for name, count in sorted(found.items()))
