"""Symbols: what compilers pass in the place of numbers while they record a graph.

An operator that treats every element alone takes them as they are: its plan depends on the type of
a number only, and the graph works for all numbers. For any other operator the number is taken that
the symbol stands for now; a graph is recorded anew for other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from ..ops import counts_by_type
from ..tensor.schemas import Op
from ..torch_private import constant_of
from .binding import Bound
from .call import Call

_NUMBER_OF: dict[type, Callable[[Any], Any]] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}
"""What makes a number of a symbol, for which alone the graph is recorded."""

_STAND_INS: dict[type, Any] = {torch.SymInt: 2, torch.SymFloat: 1.5}
"""Numbers of the same type, for what depends on nothing else."""


def with_numbers(op: Op, value: Any) -> Any:
    """Return arguments of an operator with numbers for the symbols that it cannot have."""
    keeps = counts_by_type(op, "")

    def number(symbol: Any) -> Any:
        known = constant_of(symbol)
        if known is not None:
            return known
        return symbol if keeps and type(symbol) in _STAND_INS else _NUMBER_OF[type(symbol)](symbol)

    return _mapped(number, value)


def has_symbols(call: Call) -> bool:
    """Whether there are symbols among the arguments of a call."""
    found: list[Any] = []
    _mapped(found.append, [call.args, dict(call.kwargs)])
    return bool(found)


def with_stand_ins(bound: Bound) -> Bound:
    """Return a call with some number for each symbol, to plan it for all of that type."""
    call = bound.call
    if not has_symbols(call):
        return bound
    args, kwargs = _mapped(lambda symbol: _STAND_INS[type(symbol)], [call.args, dict(call.kwargs)])
    return Bound(Call(call.cls, call.op, args, kwargs), bound.mesh, bound.leaves, bound.specs)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments with something else for every symbol, in lists and dicts, too."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _mapped(function, item) for key, item in items}
    if isinstance(value, list | tuple):
        listed = cast("list[Any]", value)
        return type(listed)([_mapped(function, item) for item in listed])
    return function(value) if type(value) in _NUMBER_OF else value
