"""The table of sharding rules: what an operator may do with placements.

A rule looks at one call and names, for one mesh axis at a time, the *rows* that are right: the
placement of every tensor input and of every output along that axis. The engine takes the cheapest
row per axis, so the cost grows with the number of axes and never with the product of their
choices. Most rules state their *factors* and get their rows from those (``factors.py``); a rule may
also list rows itself, which is what ``register_sharding`` gives to users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dtckpt.errors import PlacementError

from ...geometry.placement import Placement, Replicate
from ...mesh.spec import DTensorSpec, TensorMeta
from ...mesh.torch_layouts import AnyPlacement, placements_from_torch
from ...tensor.schemas import Op, functional_of
from ...torch_private import OpOverloadPacket, schema_of


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

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or name."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)


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


class Rows(Protocol):
    """Rows of one call."""

    def rows(self, axis: int, cuts: Cuts) -> Sequence[Row]:
        """Return the rows that ``axis`` may take."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the engine needs to know of one call."""

    rows: Rows
    local: LocalMaker | None = None
    """Returns what runs on the local tensors in place of the operator, or None for itself."""


RuleMaker = Callable[[OpCall], Rule | None]
"""Returns the rule of a call, or None where the table has none for it after all."""


class RuleTable(dict[Op, "RuleMaker"]):
    """Rules by functional operator, ours and the users' alike."""

    generation = 0
    """Grows with every rule; plans made by older rules are not used again."""
    by_users: set[Op]

    def __init__(self) -> None:
        super().__init__()
        self.by_users = set()

    def register(self, ops: Sequence[Op], maker: RuleMaker, *, by_user: bool = False) -> None:
        """Add or replace the rule of some operators; in-place forms stand for functional ones."""
        functional = [functional_of(op) or op for op in ops]
        self.update(dict.fromkeys(functional, maker))
        self.generation += 1
        if by_user:
            self.by_users.update(functional)


RULES = RuleTable()
"""The one table of rules."""

METAS: dict[Op, Callable[..., Any]] = {}
"""What makes empty results of the global shapes, for operators that torch cannot run on meta."""


def rule(*ops: Op) -> Callable[[RuleMaker], RuleMaker]:
    """Register the decorated function as the rule of some operators."""

    def register(maker: RuleMaker) -> RuleMaker:
        RULES.register(ops, maker)
        return maker

    return register


@dataclass(frozen=True, slots=True)
class ListedRows:
    """Rows that do not depend on the axis."""

    listed: tuple[Row, ...]

    def rows(self, axis: int, cuts: Cuts) -> Sequence[Row]:
        """Return the rows, which are the same for all axes."""
        del axis, cuts
        return self.listed


Shardings = Sequence[tuple[Sequence[AnyPlacement], Sequence[AnyPlacement | None]]]


def register_sharding(
    op: Op | OpOverloadPacket | Sequence[Op | OpOverloadPacket],
) -> Callable[[Callable[..., Shardings]], Callable[..., Shardings]]:
    """Register the decorated function as the rule of one operator or several.

    It is called with the arguments of the operator, a ``DTensorSpec`` in the place of every
    tensor, and returns the shardings that are right along one mesh axis: pairs of the placements
    of all outputs and of all arguments (None for those that are no tensors). All-replicate need
    not be listed. A rule of the user replaces the one of the library. An operator is named with its
    overload, as ``torch.ops.my.smooth.default``, which may be left out where there is one only.

    Raises PlacementError for what is no such operator. The first call of a kind raises it, alike on
    all ranks, where the function lists too few placements or too many, or a sharding in which local
    tensors give results of other shapes than they must.
    """
    given: list[Any] = list(op) if isinstance(op, list | tuple) else [op]
    ops = [_overload(one) for one in given]

    def register(function: Callable[..., Shardings]) -> Callable[..., Shardings]:
        def maker(call: OpCall) -> Rule:
            listed = [_replicated(call)]
            for outputs, inputs in function(*call.args, **call.kwargs):
                tensors = [p for p in inputs if p is not None]
                _require_one_each(call, outputs, inputs)
                ins = zip(tensors, call.specs, strict=True)
                outs = zip(outputs, call.outputs, strict=True)
                listed.append(
                    Row(
                        tuple(_one(p, spec.ndim) for p, spec in ins),
                        tuple(_one(p, len(m.shape) if m else 0) for p, m in outs),
                    )
                )
            return Rule(rows=ListedRows(tuple(listed)))

        RULES.register(ops, maker, by_user=True)
        return function

    return register


def _overload(op: object) -> Op:
    """Return an operator, that of a packet with one overload too."""
    if isinstance(op, Op):
        return op
    overloads: list[str] = []
    if isinstance(op, OpOverloadPacket):
        overloads = op.overloads()
        if len(overloads) == 1:
            return getattr(op, overloads[0])
    which = ", ".join(f"{op}.{name}" for name in overloads[:6])
    raise PlacementError(
        "register_sharding takes operators with their overload, such as "
        f"torch.ops.my.smooth.default, got {op!r} of {type(op).__name__}"
        + (f"; it has the overloads {which}" if which else "")
    )


def _require_one_each(
    call: OpCall, outputs: Sequence[object], inputs: Sequence[AnyPlacement | None]
) -> None:
    """Raise PlacementError unless there is one placement for each tensor, None for other values."""
    places: list[bool] = []
    for value in (*call.args, *call.kwargs.values()):
        parts: list[Any] = list(value) if isinstance(value, list | tuple) else []
        tensors = [part for part in parts if isinstance(part, DTensorSpec)]
        places.extend([True] * len(tensors) if tensors else [isinstance(value, DTensorSpec)])
    defaults = len(schema_of(call.op).arguments) - len(call.args) - len(call.kwargs)
    given = [placement is not None for placement in inputs]
    if len(outputs) != len(call.outputs) or not _fits(given, places, defaults):
        raise PlacementError(
            f"the rule registered for {call.op} gives {len(outputs)} placements of outputs and "
            f"{sum(given)} of tensor arguments in a sharding of {len(given)} arguments, expected "
            f"{len(call.outputs)} and {len(call.specs)} of {len(places)}; list all of them in "
            f"their order, with None for arguments that are no tensors (got {list(inputs)})"
        )


def _fits(given: list[bool], places: list[bool], defaults: int) -> bool:
    """Whether tensors are where they must be; arguments left to their defaults may be listed."""
    rest = given[len(places) :]
    return given[: len(places)] == places and not any(rest) and len(rest) <= max(0, defaults)


def _replicated(call: OpCall) -> Row:
    return Row((Replicate(),) * len(call.specs), (Replicate(),) * len(call.outputs))


def _one(placement: AnyPlacement, ndim: int) -> Placement:
    return placements_from_torch((placement,), (1,), ndim)[0]
