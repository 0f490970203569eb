"""Who is told what saves and restores cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dtckpt.logs import logger_of

from .costs import Costs

logger = logger_of("checkpoint")


@dataclass(frozen=True, slots=True)
class Occasion:
    """Of what in a run something is the cost."""

    kind: Literal["save", "restore"]
    step: int


OnCost = Callable[[Costs, Occasion], object]
"""Called on every rank, with its own costs, in the thread that ends the save or restore."""


def tell_cost(on_cost: OnCost | None, costs: Costs, occasion: Occasion) -> None:
    """Call ``on_cost``; what it raises is logged, for a checkpoint is not worse for it."""
    if on_cost is None:
        return
    try:
        on_cost(costs, occasion)
    except Exception:
        logger.exception("on_cost failed at the %s of step %d", occasion.kind, occasion.step)
