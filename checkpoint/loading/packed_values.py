"""Packed values beside the state that takes them.

A container of many plain values is saved as one leaf. Where the state has a container of the same
structure, or none, it takes the value as a whole. Else the nodes that the value stands for are put
into the index, and the walk goes on from value to value, as for any other container.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from ..state.tree import DICTS, SEQUENCES, dict_tag

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def is_alike(value: Any, saved: Any) -> bool:
    """Whether a container of a state and a saved value differ in nothing but their leaves.

    >>> is_alike([1, (2, 3)], [None, ("a", 4)]), is_alike([1, 2], [1]), is_alike([[1]], [1])
    (True, False, False)
    """
    if type(value) in SEQUENCES:
        if type(saved) is not type(value) or len(value) != len(saved):
            return False
        pairs: Any = zip(value, saved, strict=True)
        kinds = {*map(type, value), *map(type, saved)}
    elif type(value) in DICTS:
        if dict_tag(saved) is None or value.keys() != saved.keys():
            return False
        if not set(map(type, value)) <= {str, int}:  # True is equal to 1, and is no key
            return False
        pairs = ((item, saved[key]) for key, item in value.items())
        kinds = {*map(type, value.values()), *map(type, saved.values())}
    else:
        return False
    if kinds <= _PLAIN:
        return True
    return all(
        (type(one) in _PLAIN and type(other) in _PLAIN) or is_alike(one, other)
        for one, other in pairs
    )


def filled(value: Any, saved: Any, may_fill: Callable[[Any], bool]) -> Any:
    """Return a container with the saved leaves: itself where it ``may_fill``, else a new one.

    ``value`` is alike. Containers within it are treated in the same way.
    """
    kinds = set(map(type, saved.values() if isinstance(saved, Mapping) else saved))
    has_containers = not kinds <= _PLAIN
    if isinstance(value, MutableMapping):
        items: Any = (
            {key: _item(value[key], item, may_fill) for key, item in saved.items()}
            if has_containers
            else saved
        )
        if may_fill(value):
            value.update(items)
            return value  # pyright: ignore[reportUnknownVariableType]
        made = value.copy()  # pyright: ignore
        made.update({key: items[key] for key in value})  # in the order of the state
        return made  # pyright: ignore[reportUnknownVariableType]
    new: list[Any] = (
        [_item(old, item, may_fill) for old, item in zip(value, saved, strict=True)]
        if has_containers
        else list(saved)
    )
    if isinstance(value, list) and may_fill(value):
        value[:] = new
        return value  # pyright: ignore[reportUnknownVariableType]
    return type(value)(new)


def _item(value: Any, saved: Any, may_fill: Callable[[Any], bool]) -> Any:
    return saved if type(saved) in _PLAIN else filled(value, saved, may_fill)
