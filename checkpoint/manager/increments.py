"""Saves that refer to what has not changed since an earlier one, and how many of them in a row."""

from __future__ import annotations


class Increments:
    """Which step the next save refers to; None where it stands on its own.

    >>> increments = Increments(2)
    >>> for step in (1, 2, 3, 4):
    ...     print(step, increments.next_base())
    ...     increments.saved(step)
    1 None
    2 1
    3 2
    4 None
    """

    def __init__(self, most: int) -> None:
        """``most`` is how many saves in a row may refer to earlier ones."""
        self._most = most
        self._num_referring = 0
        self._base: int | None = None

    def next_base(self) -> int | None:
        """Return the step that a save refers to which begins now."""
        base = self._base if self._num_referring < self._most else None
        self._num_referring = 0 if base is None else self._num_referring + 1
        return base

    def saved(self, step: int) -> None:
        """Note that a step was saved where others can refer to it."""
        self._base = step

    def break_off(self) -> None:
        """Have the next save stand on its own."""
        self._base = None
