"""Sharding rules by family, and how the rule of an operator is found."""

from __future__ import annotations

from importlib import import_module

from ..tensor.schemas import Op, base_name, is_foreach, is_pointwise
from .engine.table import RULES, OpCall, Rule, RuleMaker
from .pointwise import pointwise

FAMILIES = (
    "attention",
    "channels",
    "classes",
    "contraction",
    "convolution",
    "creation",
    "embedding",
    "fft",
    "indexing",
    "joining",
    "linalg",
    "loss",
    "norm",
    "padding",
    "pooling",
    "random",
    "rearranging",
    "reduction",
    "scan",
    "scattering",
    "slicing",
    "views",
)
"""Modules that fill the table when they are imported, which is here."""

for _family in FAMILIES:
    import_module(f".{_family}", __name__)

NOT_ELEMENTWISE = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})


def rule_maker(op: Op) -> RuleMaker | None:
    """Return what makes the rule of a functional operator, if the table has one."""
    maker = RULES.get(op)
    if maker is not None:
        return maker
    if is_pointwise(op) or (is_foreach(op) and base_name(op) not in NOT_ELEMENTWISE):
        return pointwise
    return None


def find_rule(op: Op, call: OpCall) -> Rule | None:
    """Return the rule of one call, if there is one."""
    maker = rule_maker(op)
    return None if maker is None else maker(call)
