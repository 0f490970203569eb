"""What is logged of operators, for ``DTCKPT_LOGS`` (``dtckpt.logs``)."""

from __future__ import annotations

from logging import DEBUG, INFO
from typing import TYPE_CHECKING, Any

from dtckpt.logs import logger_of

from ..comm.traffic import call_site

if TYPE_CHECKING:
    from .binding import Binding
    from .plan import LocalPlan

_operators = logger_of("dtensor")


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
