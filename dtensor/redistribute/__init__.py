"""Redistribute: from one layout to another, on the same mesh or on another one.

``route`` chooses the way, by ``hops``; ``seats`` says which of the ``steps`` a rank takes for each;
``plans`` remembers and runs, ``together`` those of several tensors. ``parts`` is for tensors that
no mesh describes.
"""

from .explain import Explanation, explain
from .plans import (
    RedistributePlan,
    moves_nothing,
    moves_without_values,
    plan_redistribute,
    redistribute_local,
    scatter_local,
    start_redistribute,
)
from .route import require_commuting
from .together import redistribute_locals, run_together, start_redistribute_locals

__all__ = [
    "Explanation",
    "RedistributePlan",
    "explain",
    "moves_nothing",
    "moves_without_values",
    "plan_redistribute",
    "redistribute_local",
    "redistribute_locals",
    "require_commuting",
    "run_together",
    "scatter_local",
    "start_redistribute",
    "start_redistribute_locals",
]
