"""What ``torch.compile`` does not look into.

Dynamo, which records Python code as graphs, does not follow into marked functions: plans, caches
and process groups have no place in a graph. Every call of one is a graph break. Operators on
DTensors are none: they are recorded as what they do to local tensors (``traceable``). Nothing here
imports Dynamo, so a job that does not compile pays nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from ..torch_private import skip_strategy

T = TypeVar("T")


_STRATEGY = skip_strategy()


def opaque(thing: T, *, but: Collection[str] = ()) -> T:
    """Mark a function, or the methods of a class, as none for compilers to look into.

    ``but`` has names of methods that they may.
    """
    if isinstance(thing, type):
        for name, value in list(vars(thing).items()):
            marked = value if name in but else _opaque_member(value)
            if marked is not value:
                setattr(thing, name, marked)
        return thing
    return _opaque_member(thing)


def _opaque_member(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        function: Any = value.__func__
        marked = _opaque_member(function)
        return value if marked is function else type(value)(marked)
    if isinstance(value, property):
        given = (value.fget, value.fset)
        pair = tuple(_opaque_member(accessor) for accessor in given)
        return value if pair == given else property(*pair)
    return _opaque_function(value) if hasattr(value, "__code__") else value


def _opaque_function(function: Any) -> Any:
    if _STRATEGY is None:
        return disabled_when_compiling(function)
    set_strategy, skip = _STRATEGY
    set_strategy(function.__code__, skip)  # where it is called
    function._torchdynamo_disable = True  # where it would be followed into
    return function


def disabled_when_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compilers do not look into, by torch's public means."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run
