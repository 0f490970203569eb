"""Sequences that are taken over whole, where a checkpoint may have more than the state.

Elements are found by their position. A list that was saved longer than the one in the state would
lose its end, which nobody had asked for, and nobody would miss.
"""

from __future__ import annotations

from typing import Any

from ..state.tree import SEQUENCES, PerRank, dict_tag, is_stateful
from ..tensors.local_tensor import tensor_tag


def is_whole(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a sequence is one value: a list of plain values, or a tuple without tensors.

    >>> is_whole([1, [2, 3]]), is_whole(({"lr": 1.0},)), is_whole([{"lr": 1.0}])
    (True, True, False)
    """
    return not _has_parts(value, of_dicts=isinstance(value, tuple))


def _has_parts(value: Any, *, of_dicts: bool) -> bool:
    """Whether there is something that is filled in place; within dicts only if they are no part."""
    if tensor_tag(value) is not None or isinstance(value, PerRank) or is_stateful(value):
        return True
    if dict_tag(value) is not None:
        return not of_dicts or any(_has_parts(item, of_dicts=True) for item in value.values())
    if type(value) not in SEQUENCES:
        return False
    return any(_has_parts(item, of_dicts=of_dicts) for item in value)
