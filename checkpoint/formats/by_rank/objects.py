"""Objects in pickles of which the attributes are kept, and the lists of numbers among these."""

from __future__ import annotations

from typing import Any

from ...state.limits import list_of, size_of
from ..pickles.unpickling import Record


class Object(Record):
    """An object of a class, with the arguments that made it."""

    def __new__(cls, *args: Any) -> Object:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # of slots
        super().__setstate__(state)


def list_of_ints(value: Any) -> tuple[int, ...]:
    """Return sizes or offsets; ValueError for anything else."""
    return tuple(size_of(n, "a size or an offset") for n in as_list(value))


def as_list(value: Any) -> list[Any]:
    """Return a list or a tuple as a list; ValueError for anything else."""
    return list_of(list(value) if isinstance(value, tuple) else value, "sizes or offsets")
