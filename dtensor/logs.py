"""What is logged of operators and redistributes, for ``DTCKPT_LOGS`` (``dtckpt.logs``)."""

from __future__ import annotations

from functools import lru_cache
from logging import DEBUG, INFO
from typing import TYPE_CHECKING, Any

import torch

from dtckpt.logs import logger_of

from .costs import CostModel
from .layout import Layout, format_placements
from .traffic import call_site

if TYPE_CHECKING:
    from .calls.binding import Binding
    from .calls.plan import LocalPlan
    from .redistribute import RedistributePlan
    from .spec import DTensorSpec

_operators = logger_of("dtensor")
_redistributes = logger_of("redistribute")


def logs_redistributes() -> bool:
    """Whether every redistribute is to be noted."""
    return _redistributes.isEnabledFor(INFO)


def note_redistribute(source: DTensorSpec, target: DTensorSpec, plan: RedistributePlan) -> None:
    """Log a redistribute that is about to run on this rank, if ``logs_redistributes``."""
    mesh = source.mesh
    layouts, rank = (source.layout, target.layout), mesh.get_rank()
    received, sent = _bytes_of(*layouts, source.dtype, mesh.cost_model(), rank)
    there = "" if target.mesh == mesh else f" on {target.mesh.layout_mesh}"
    where = f" at {call_site()}" if _redistributes.isEnabledFor(DEBUG) else ""
    _redistributes.info(
        "%s %s (%s) on %s -> (%s)%s: %d bytes received, %d sent; %s%s",
        source.dtype,
        list(source.shape),
        format_placements(source.placements),
        mesh.layout_mesh,
        format_placements(target.placements),
        there,
        received,
        sent,
        plan,
        where,
    )


@lru_cache(maxsize=1024)
def _bytes_of(
    source: Layout, target: Layout, dtype: torch.dtype, costs: CostModel, rank: int
) -> tuple[int, int]:
    from .redistribute import explain

    told = explain(source, target, dtype, costs=costs, ranks=[rank])
    return told.received_bytes[rank], told.sent_bytes[rank]


def noted_plan(op: Any, bound: Binding, plan: LocalPlan | None) -> LocalPlan | None:
    """Log a plan that was made just now, and return it; None stands for no rule."""
    if _operators.isEnabledFor(DEBUG):
        inputs = ", ".join(map(str, bound.specs))
        if plan is None:
            _operators.debug("%s(%s): no rule", op, inputs)
        else:
            moves = "; ".join(f"{source} -> {target}" for _, source, target in plan.moves)
            outputs = ", ".join(str(spec) for spec in plan.outputs)
            _operators.debug(
                "%s(%s) -> %s, redistributing %s", op, inputs, outputs, moves or "nothing"
            )
    return plan


def note_fallback(op: Any, bound: Binding, how: str) -> None:
    """Log an operator that has no rule of its own and runs in another way."""
    if _operators.isEnabledFor(INFO):
        inputs = ", ".join(map(str, bound.specs))
        where = f" at {call_site()}" if _operators.isEnabledFor(DEBUG) else ""
        _operators.info("%s(%s): %s%s", op, inputs, how, where)
