"""Values in nested containers: taken apart into a list, and put together of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..torch_private import tree_functions


def flatten_tree(value: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return what stands in nested containers, in order, and what puts others in their places.

    torch's trees know the containers that users have registered, too, such as the outputs of
    transformers; where it has none, containers are tuples, lists and dicts.
    """
    functions = tree_functions()
    if functions is None:
        leaves: list[Any] = []
        rebuild = _flatten(value, leaves)
        return leaves, lambda others: rebuild(iter(others))
    flatten, unflatten = functions
    leaves, form = flatten(value)
    return leaves, lambda others: unflatten(list(others), form)


def _flatten(value: Any, leaves: list[Any]) -> Callable[[Iterator[Any]], Any]:
    if isinstance(value, dict):
        mapping: dict[Any, Any] = value
        parts = {key: _flatten(item, leaves) for key, item in mapping.items()}
        return lambda others: {key: part(others) for key, part in parts.items()}
    if isinstance(value, list | tuple):
        kind: Any = type(value)
        items = [_flatten(item, leaves) for item in value]
        make = kind._make if hasattr(kind, "_make") else kind  # named tuples
        return lambda others: make([item(others) for item in items])
    leaves.append(value)
    return next
