"""The key of a call: equal for two calls that do the same, whatever values their tensors have.

It is made for every call, and so of what is cheap: specs are interned and count by identity, as
operators do. A list is a tuple of its parts. Any other argument counts by its value. Numbers need
care, since 1, 1.0 and True are equal, as are 0.0 and -0.0:

* An argument that the schema says is an int or a bool is one, and counts by its value.
* A number that decides nothing about a plan counts by its type (``counts_by_type``).
* Every other number counts by its type and its value.

What counts by its type only is not known to a plan: it is made with ``blank`` arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

from ..ops import counts_by_type
from ..ops.engine.table import RULES
from ..tensor.schemas import Op
from ..tensor.wrapper import Wrapper
from ..torch_private import schema_of

Key = tuple[Any, ...]
"""The operator, the default dtype, the generation of the rules, and a part per argument."""

NUMBERS = frozenset({bool, int, float, complex, torch.SymInt, torch.SymFloat})
"""Types of numbers, and of what stands for them while a graph is recorded (``symbols``)."""
by_type: set[int] = set()
"""Operators, by identity, whose second argument counts by its type if it is a number."""

_Part = Callable[[Any], Any]
"""Returns the part of a key for a number."""


class _Numbers(NamedTuple):
    """How the numbers of an operator count; None where they do by their value alone."""

    op: Op
    """Its identity is its own as long as it is here."""
    by_place: tuple[_Part | None, ...]
    by_name: Mapping[str, _Part | None]


_known: dict[int, _Numbers] = {}
"""By the identity of an operator."""
_get_dtype = torch.get_default_dtype


def key_of(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[Key, list[Any], dict[str, Any]]:
    """Return the key of a call, and its arguments with local tensors in the place of ``cls``'s.

    Other tensors add themselves, but such keys are only looked up: nothing is remembered under
    them. Specs may stand for tensors, and are seen as those are.
    """
    _, parts, parts_by_name = _known.get(id(op)) or _learn(op)
    key: list[Any] = [id(op), _get_dtype(), RULES.generation]
    locals_: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is cls:
            key.append(value.spec)
            locals_.append(value.local)
        elif kind is list:
            locals_.append(_add_list(key, cls, value, parts[len(locals_)]))
        else:
            number = parts[len(locals_)] if kind in NUMBERS else None
            key.append(value if number is None else number(value))
            locals_.append(value)
    local_kwargs: dict[str, Any] = {}
    for name, value in kwargs.items() if kwargs else ():
        kind = type(value)
        key.append(name)
        if kind is cls:
            key.append(value.spec)
            local_kwargs[name] = value.local
        elif kind is list:
            local_kwargs[name] = _add_list(key, cls, value, parts_by_name[name])
        else:
            number = parts_by_name[name] if kind in NUMBERS else None
            key.append(value if number is None else number(value))
            local_kwargs[name] = value
    return tuple(key), locals_, local_kwargs


def _add_list(
    key: list[Any], cls: type[Wrapper], values: list[Any], number: _Part | None
) -> list[Any]:
    """Add the part of a list, and return the list with local tensors."""
    specs = [item.spec for item in values if type(item) is cls]
    if not specs:
        key.append(_numbers(values, number))
        return values
    if len(specs) == len(values):
        key.append(tuple(specs))
        return [item.local for item in values]
    key.append(tuple([item.spec if type(item) is cls else item for item in values]))
    return [item.local if type(item) is cls else item for item in values]


def _numbers(values: list[Any], number: _Part | None) -> tuple[Any, ...]:
    if number is None:
        return tuple(values)
    if number is type and NUMBERS.issuperset(kinds := tuple(map(type, values))):
        return kinds
    return tuple([number(item) if type(item) in NUMBERS else item for item in values])


def blank(
    op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with a one in the place of every number that counts by its type only."""
    _, parts, parts_by_name = _known.get(id(op)) or _learn(op)
    return (
        tuple([_blank(value, part) for value, part in zip(args, parts, strict=False)]),
        {name: _blank(value, parts_by_name[name]) for name, value in kwargs.items()},
    )


def _blank(value: Any, number: _Part | None) -> Any:
    if number is not type:
        return value
    if isinstance(value, list):
        return [_blank(item, number) for item in cast("list[Any]", value)]
    return type(value)(1) if type(value) in NUMBERS else value


def _exact(number: Any) -> Any:
    """Return a number with its type, and the text of those that equal others or not themselves."""
    kind = type(number)
    if kind is complex or (kind is float and (not number or number != number)):
        return kind, repr(number)
    return kind, number


def _learn(op: Op) -> _Numbers:
    """Return how the numbers of an operator count, from its schema and its rule."""
    arguments = schema_of(op).arguments
    parts = [_part_of(op, argument) for argument in arguments]
    by_name = {argument.name: part for argument, part in zip(arguments, parts, strict=True)}
    if len(parts) > 1 and parts[1] is type:
        by_type.add(id(op))
    return _known.setdefault(id(op), _Numbers(op, tuple(parts), by_name))


def _forget() -> None:
    """Forget how numbers count: a rule of the user's may read what none read before."""
    by_type.clear()
    _known.clear()


RULES.on_change.append(_forget)


def _part_of(op: Op, argument: Any) -> _Part | None:
    # A number may also stand in the place of a tensor.
    if not any(kind in str(argument.type) for kind in ("number", "float", "Tensor")):
        return None
    return type if counts_by_type(op, argument.name) else _exact
