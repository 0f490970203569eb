"""Tensor parallel plans from traced models, under the name of torch's module.

torch's rewrites the traced graph for one rank, linear layers only. Here a traced model tells a
plan, which ``parallelize_module`` takes for the model itself, and the layouts by which checkpoints
of it are resharded.
"""

from __future__ import annotations

from ..parallel.tracing import placement_rules_of, plan_of

__all__ = ["placement_rules_of", "plan_of"]
