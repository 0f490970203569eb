"""Rules of users: a function that lists the shardings of an operator along one mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.errors import PlacementError

from ...geometry.placement import Placement, Replicate
from ...mesh.spec import DTensorSpec
from ...mesh.torch_layouts import AnyPlacement, placements_from_torch
from ...tensor.schemas import Op
from ...torch_private import OpOverloadPacket, outside_modes, schema_of
from ..engine.table import RULES, Cuts, OpCall, Row, Rule
from .checks import check_rows


@dataclass(frozen=True, slots=True)
class ListedRows:
    """A rule by rows that do not depend on the axis."""

    listed: tuple[Row, ...]
    local: None = None

    def rows(self, axis: int, cuts: Cuts) -> Sequence[Row]:
        """Return the rows, which are the same for all axes."""
        del axis, cuts
        return self.listed


Shardings = Sequence[tuple[Sequence[AnyPlacement], Sequence[AnyPlacement | None]]]


def register_sharding(
    op: Op | OpOverloadPacket | Sequence[Op | OpOverloadPacket],
    *,
    check: bool = False,
) -> Callable[[Callable[..., Shardings]], Callable[..., Shardings]]:
    """Register the decorated function as the rule of one operator or several.

    It is called with the arguments of the operator, a ``DTensorSpec`` in the place of every
    tensor, and returns the shardings that are right along one mesh axis: pairs of the placements
    of all outputs and of all arguments (None for those that are no tensors). All-replicate need
    not be listed. A rule of the user replaces the one of the library. An operator is named with its
    overload, as ``torch.ops.my.smooth.default``, which may be left out where there is one only.

    With ``check`` the first call of a kind tries every sharding that is listed, without
    communication: every rank runs the operator on random values of the call's shapes, whole and cut
    for 2 and 3 ranks or more, so for tests rather than for large tensors. One that gives anything
    else is a PlacementError that names it, the ranks and the largest difference, alike on all
    ranks. What draws random numbers cannot be checked.

    Raises PlacementError for what is no such operator. The first call of a kind raises it, alike on
    all ranks, where the function lists too few placements or too many, or a sharding in which local
    tensors give results of other shapes than they must.
    """
    given: list[Any] = list(op) if isinstance(op, list | tuple) else [op]
    ops = [_overload(one) for one in given]
    random = [op for op in ops if torch.Tag.nondeterministic_seeded in op.tags]
    if check and random:
        raise PlacementError(
            f"register_sharding: {random[0]} draws random numbers, so that check=True has nothing "
            "to compare; leave it out"
        )

    def register(function: Callable[..., Shardings]) -> Callable[..., Shardings]:
        def maker(call: OpCall) -> Rule:
            listed = [Row((Replicate(),) * len(call.specs), (Replicate(),) * len(call.outputs))]
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
            if check:
                with outside_modes():
                    check_rows(call, listed[1:])
            return ListedRows(tuple(listed))

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


def _one(placement: AnyPlacement, ndim: int) -> Placement:
    return placements_from_torch((placement,), (1,), ndim)[0]
