"""The tensors among the arguments of a call, wherever they stand in lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def collect_tensors(values: Any, into: list[Tensor]) -> None:
    """Append every tensor in ``values``, and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, list | tuple):
            collect_tensors(value, into)


def substitute(value: Any, replacements: Iterator[Any]) -> Any:
    """Return ``value`` with every tensor in it replaced by the next replacement."""
    if isinstance(value, Tensor):
        return next(replacements)
    if isinstance(value, list | tuple):
        return type(value)([substitute(item, replacements) for item in value])
    return value


def substituted(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], replacements: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with every tensor replaced, in the order of ``collect_tensors``."""
    remaining = iter(replacements)
    return (
        tuple([substitute(arg, remaining) for arg in args]),
        {name: substitute(arg, remaining) for name, arg in kwargs.items()},
    )


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, item) for item in value])
    return value
