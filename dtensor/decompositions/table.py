"""The table of our own decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..tensor.schemas import Op

Decomposition = Callable[..., Any]
"""Takes what the operator takes, distributed tensors in it, and returns what it returns; or
NotImplemented where this call is better left to its sharding rule. Which of the two must follow
from specs and arguments, as plans do: a call that was left to the rule once is not asked again."""

DECOMPOSITIONS: dict[Op, Decomposition] = {}
"""By operator. Unlike a rule, a decomposition may do several operators and communicate."""


def decomposition(*ops: Op) -> Callable[[Decomposition], Decomposition]:
    """Register the decorated function for some operators.

    It is asked before the rule of the operator, unless every tensor is replicated on all axes and
    there is a rule. A rule of the user goes before it.
    """

    def register(function: Decomposition) -> Decomposition:
        DECOMPOSITIONS.update(dict.fromkeys(ops, function))
        return function

    return register


UNBOUND: dict[Op, Decomposition] = {}
"""Own functions of operators on lists that may hold tensors of several meshes and plain ones, and
that need to see them together."""


def unbound(*ops: Op) -> Callable[[Decomposition], Decomposition]:
    """Register the decorated function for some operators; nothing is asked before it."""

    def register(function: Decomposition) -> Decomposition:
        UNBOUND.update(dict.fromkeys(ops, function))
        return function

    return register
