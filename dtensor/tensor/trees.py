"""Values in nested containers: taken apart into a list, and put together of another."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

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


Known = dict[int, tuple[Any, Any]]
"""Objects and what they became, by identity; the objects are held so that no other gets theirs."""


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with every tensor in it changed; the same object where none is another one.

    Tensors are found in containers as by ``flatten_tree``, in fields of dataclasses, in sets and in
    subclasses of dict, list and tuple, at any depth. Objects with a changed tensor are copied: the
    copy has the class and all other attributes of the original. Where an object refers back to one
    that holds it, the copy refers to the original.
    """
    return _mapped(change, value, {})


def _mapped(change: Callable[[Tensor], Tensor], value: Any, known: Known) -> Any:
    leaves, rebuild = flatten_tree(value)
    changed = [
        change(leaf) if isinstance(leaf, Tensor) else _mapped_object(change, leaf, known)
        for leaf in leaves
    ]
    is_same = all(new is old for new, old in zip(changed, leaves, strict=True))
    return value if is_same else rebuild(changed)


def _mapped_object(change: Callable[[Tensor], Tensor], value: Any, known: Known) -> Any:
    """Do the same for a leaf of torch's trees that is a container all the same.

    An object that is met twice is copied once.
    """
    if id(value) in known:
        return known[id(value)][1]
    kind: Any = type(value)
    is_record = hasattr(kind, "__dataclass_fields__") and not issubclass(kind, nn.Module)
    if not is_record and not issubclass(kind, dict | list | tuple | set | frozenset):
        return value
    known[id(value)] = value, value  # for references back to it from within
    if is_record:
        made = _mapped_record(change, value, known)
    elif issubclass(kind, dict | list):
        changed = _changed(change, value, known)
        made = copy.copy(value) if changed else value
        for key, new in changed.items():
            made[key] = new
    else:
        parts: list[Any] = list(value)
        changed = _changed(change, parts, known)
        new_parts = [changed.get(i, part) for i, part in enumerate(parts)]
        make: Any = getattr(kind, "_make", kind)  # named tuples, of which some have a __new__
        made = make(new_parts) if changed else value
    known[id(value)] = value, made
    return made


def _mapped_record(change: Callable[[Tensor], Tensor], record: Any, known: Known) -> Any:
    parts = {f.name: getattr(record, f.name, None) for f in dataclasses.fields(record)}
    changed = _changed(change, parts, known)
    if not changed:
        return record
    # Not dataclasses.replace: it takes no fields with init=False, and drops other attributes.
    made = copy.copy(record)
    kind: Any = type(record)
    for name, new in changed.items():
        (object.__setattr__ if kind.__dataclass_params__.frozen else setattr)(made, name, new)
    return made


def _changed(change: Callable[[Tensor], Tensor], parts: Any, known: Known) -> dict[Any, Any]:
    """Return what is another object now, by key or index."""
    pairs: Any = parts.items() if isinstance(parts, dict) else enumerate(parts)
    found = {key: _mapped(change, part, known) for key, part in pairs}
    return {key: new for key, new in found.items() if new is not parts[key]}
