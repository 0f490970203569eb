"""The key of a call: equal for two calls that do the same, whatever values their tensors have.

It is made for every call, and so of what is cheap: specs are interned and count by identity, as
operators do. A list is a tuple of its parts. Any other argument counts by its value, but a number
where that may be of any type: 1, 1.0 and True are equal. It then counts by its type, and by its
value, too, unless the operator treats every element alone: plans do not depend on it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..ops.engine.table import RULES
from ..tensor.schemas import Op, is_foreach, is_pointwise
from ..tensor.wrapper import Wrapper
from ..torch_private import schema_of

Key = tuple[Any, ...]
"""The operator, the default dtype, the generation of the rules, and a part per argument."""

NUMBERS = frozenset({bool, int, float, complex})
by_type: set[int] = set()
"""Operators, by identity, whose numbers count by their type and not by their value."""

_Part = Callable[[Any], Any]
_known: dict[int, tuple[Op, _Part | None]] = {}
"""How numbers count, None for by value, by the identity of an operator. That is its own as long as
the operator is here."""
_get_dtype = torch.get_default_dtype


def key_of(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[Key, list[Any], dict[str, Any]]:
    """Return the key of a call, and its arguments with local tensors in the place of ``cls``'s.

    Other tensors add themselves, but such keys are only looked up: nothing is remembered under
    them. Specs may stand for tensors, and are seen as those are.
    """
    number = (_known.get(id(op)) or _learn(op))[1]
    key: list[Any] = [id(op), _get_dtype(), RULES.generation]
    locals_: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is cls:
            key.append(value.spec)
            locals_.append(value.local)
        elif kind is list:
            locals_.append(_add_list(key, cls, value, number))
        else:
            key.append(value if number is None or kind not in NUMBERS else number(value))
            locals_.append(value)
    local_kwargs: dict[str, Any] = {}
    for name, value in kwargs.items() if kwargs else ():
        kind = type(value)
        key.append(name)
        if kind is cls:
            key.append(value.spec)
            local_kwargs[name] = value.local
        elif kind is list:
            local_kwargs[name] = _add_list(key, cls, value, number)
        else:
            key.append(value if number is None or kind not in NUMBERS else number(value))
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


def _with_type(number: Any) -> Any:
    return type(number), number


def _learn(op: Op) -> tuple[Op, _Part | None]:
    number: _Part | None = None
    if is_pointwise(op) or is_foreach(op):
        number = type
        by_type.add(id(op))
    elif any("number" in str(argument.type) for argument in schema_of(op).arguments):
        number = _with_type
    return _known.setdefault(id(op), (op, number))
