"""Facts of operators that their schemas tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..comm.caches import remembered
from ..torch_private import OpOverload, schema_of

Op = OpOverload

MAX_OPERATORS = 8192
"""Operators whose facts are remembered: all that torch has."""

_FUNCTIONAL_NAMES = {"normal_": "normal_functional"}
"""Where it is not the name without the underscore."""


@remembered(MAX_OPERATORS)
def functional_of(op: Op) -> Op | None:
    """Return the form of an in-place or ``out=`` operator that writes nothing, if there is one.

    A functional operator is its own.
    """
    if not schema_of(op).is_mutable:
        return op
    namespace, name = str(schema_of(op).name).split("::")
    in_place = is_in_place(op)
    wanted_name = _FUNCTIONAL_NAMES.get(name, name[:-1]) if in_place else name
    packet = getattr(getattr(torch.ops, namespace), wanted_name, None)
    if packet is None:
        return None
    wanted = _signature(op)
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if not schema_of(found).is_mutable and _signature(found) == wanted:
            return found
    return None


def _signature(op: Op) -> list[tuple[str, str]]:
    """Return names and types of the arguments, those for results left out."""
    return [(arg.name, str(arg.type)) for arg in schema_of(op).arguments if not arg.is_out]


@remembered(MAX_OPERATORS)
def base_name(op: Op) -> str:
    """Return the name of an operator without namespace and overload."""
    return schema_of(op).name.split("::")[1]


@remembered(MAX_OPERATORS)
def argument_place(op: Op, *names: str) -> tuple[int, str, Any] | None:
    """Return position, name and default of the argument that has one of these names, if any."""
    for position, argument in enumerate(schema_of(op).arguments):
        if argument.name in names:
            return position, argument.name, argument.default_value
    return None


def argument_of(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> Any:
    """Return the argument that has one of these names, or its default; None without one."""
    found = argument_place(op, *names)
    if found is None:
        return None
    position, name, default = found
    return args[position] if position < len(args) else kwargs.get(name, default)


@remembered(MAX_OPERATORS)
def is_in_place(op: Op) -> bool:
    """Whether the operator writes its first argument and returns it."""
    schema = schema_of(op)
    return schema.is_mutable and schema.name.endswith("_") and is_written(schema.arguments[0])


@remembered(MAX_OPERATORS)
def is_pointwise(op: Op) -> bool:
    """Whether every element of the result depends on the same element of the inputs only."""
    return torch.Tag.pointwise in op.tags and not is_random(op)


@remembered(MAX_OPERATORS)
def is_foreach(op: Op) -> bool:
    """Whether the operator does the same for every element of lists of tensors."""
    return schema_of(op).name.startswith("aten::_foreach_")


@remembered(MAX_OPERATORS)
def is_random(op: Op) -> bool:
    """Whether the operator draws random numbers."""
    takes_generator = any(arg.name == "generator" for arg in schema_of(op).arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in op.tags


def is_written(argument: Any) -> bool:
    """Whether the operator writes an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write
