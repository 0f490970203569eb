"""The tables that say how operators run: by a sharding rule, or by a decomposition of ours.

A rule looks at one call and names, for one mesh axis at a time, the *rows* that are right: the
placement of every tensor input and of every output along that axis. The engine takes the cheapest
row per axis, so the cost grows with the number of axes and never with the product of their
choices. Most rules state their *factors* and get their rows from those (``factors.py``); a rule may
also list rows itself, which is what ``register_sharding`` gives to users.

A decomposition is a function of our own that runs in place of the operator, on distributed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

from ...geometry.placement import Placement
from ...mesh.spec import DTensorSpec, TensorMeta
from ...tensor.schemas import Op, argument_of, functional_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of an operator, with a spec in the place of every tensor."""

    op: Op
    """The functional form, also where the call is in place."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    specs: tuple[DTensorSpec, ...]
    """Specs of the tensor inputs in the order they appear."""
    outputs: tuple[TensorMeta | None, ...]
    """Global shape, strides and dtype of every output; None where there is no tensor."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Global shape of the first output."""
        first = self.outputs[0]
        return () if first is None else tuple(first.shape)

    def arg(self, *names: str) -> Any:
        """Return the argument that has one of these names, or its default; None without one."""
        return argument_of(self.op, self.args, self.kwargs, *names)


@dataclass(frozen=True, slots=True)
class Row:
    """Placements along one axis that are right together."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: int | None = None
    """The factor that the axis splits, if it splits one."""
    extra_bytes: float = 0.0
    """What the row costs beside the moves of its inputs."""


@dataclass(slots=True)
class Cuts:
    """What the axes looked at so far split."""

    mesh_shape: tuple[int, ...]
    axes: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """By factor, the axes that split it."""
    first_leads: bool = False
    """Whether the first input is written in place, so that all others are cut as it is."""


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What is known of a call when its local part is chosen."""

    call: OpCall
    inputs: tuple[DTensorSpec, ...]
    """Specs of the inputs after redistribution."""
    outputs: tuple[DTensorSpec | None, ...]
    op: Op
    """The operator as it was called, which may write to its first argument."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Local shape of the first output."""
        first = self.outputs[0]
        return () if first is None else first.local_shape


LocalMaker = Callable[[LocalCall], Callable[..., Any] | None]

IN_ANY_ORDER: WeakSet[LocalMaker] = WeakSet()
"""Those for which the indices of a part may be any: they do not ask where it begins."""


def in_any_order(maker: LocalMaker) -> LocalMaker:
    """Mark what makes local kernels as one of ``IN_ANY_ORDER``."""
    IN_ANY_ORDER.add(maker)
    return maker


class Rule(Protocol):
    """What the engine needs to know of one call."""

    @property
    def local(self) -> LocalMaker | None:
        """Returns what runs on the local tensors in place of the operator, or None for itself."""
        ...

    def rows(self, axis: int, cuts: Cuts) -> Sequence[Row]:
        """Return the rows that ``axis`` may take."""
        ...


RuleMaker = Callable[[OpCall], Rule | None]
"""Returns the rule of a call, or None where the table has none for it after all."""


class RuleTable(dict[Op, "RuleMaker"]):
    """Rules by functional operator, ours and the users' alike."""

    generation = 0
    """Grows with every rule; plans made by older rules are not used again."""
    by_users: set[Op]
    on_change: list[Callable[[], None]]
    """Called after a rule was added."""

    def __init__(self) -> None:
        super().__init__()
        self.by_users = set()
        self.on_change = []

    def register(self, ops: Sequence[Op], maker: RuleMaker, *, by_user: bool = False) -> None:
        """Add or replace the rule of some operators; in-place forms stand for functional ones."""
        functional = [functional_of(op) or op for op in ops]
        self.update(dict.fromkeys(functional, maker))
        self.generation += 1
        if by_user:
            self.by_users.update(functional)
        for call in self.on_change:
            call()


RULES = RuleTable()
"""The one table of rules."""


def rule(*ops: Op) -> Callable[[RuleMaker], RuleMaker]:
    """Register the decorated function as the rule of some operators."""

    def register(maker: RuleMaker) -> RuleMaker:
        RULES.register(ops, maker)
        return maker

    return register


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
    return _registering(DECOMPOSITIONS, ops)


ACROSS_MESHES: dict[Op, Decomposition] = {}
"""Decompositions of operators on lists that may hold tensors of several meshes and plain ones, and
that need to see them together."""


def across_meshes(*ops: Op) -> Callable[[Decomposition], Decomposition]:
    """Register the decorated function for some operators; nothing is asked before it."""
    return _registering(ACROSS_MESHES, ops)


METAS: dict[Op, Callable[..., Any]] = {}
"""What makes empty results of the global shapes, for operators that torch cannot run on meta, or
not as fast."""


def meta(*ops: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function, which takes tensors without data, for some operators."""
    return _registering(METAS, ops)


def _registering(
    table: dict[Op, Callable[..., Any]], ops: Sequence[Op]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        table.update(dict.fromkeys(ops, function))
        return function

    return register
