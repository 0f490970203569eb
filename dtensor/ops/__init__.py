"""How operators treat placements: one family of operators a file (see README.md)."""

from __future__ import annotations

from ..tensor.schemas import Op, base_name, is_foreach, is_pointwise
from . import (
    activation,
    as_strided,
    attention,
    batch_norm,
    contraction,
    convolution,
    creation,
    diagonal,
    distributions,
    embedding,
    extremes,
    fft,
    foreach_norm,
    gather_scatter,
    group_norm,
    histogram,
    indexing,
    joining,
    layer_norm,
    linalg,
    loss,
    multinomial,
    nll_loss,
    norm,
    optimizer_steps,
    padding,
    pointwise,
    pooling,
    random,
    rearranging,
    reduction,
    resampling,
    scan,
    slicing,
    softmax,
    sorting,
    variance,
    views,
    weight_norm,
)
from .engine.table import RULES, OpCall, Rule, RuleMaker

NOT_ELEMENTWISE = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})

FAMILIES = (
    activation,
    as_strided,
    attention,
    batch_norm,
    contraction,
    convolution,
    creation,
    diagonal,
    distributions,
    embedding,
    extremes,
    fft,
    foreach_norm,
    gather_scatter,
    group_norm,
    histogram,
    indexing,
    joining,
    layer_norm,
    linalg,
    loss,
    multinomial,
    nll_loss,
    norm,
    optimizer_steps,
    padding,
    pointwise,
    pooling,
    random,
    rearranging,
    reduction,
    resampling,
    scan,
    slicing,
    softmax,
    sorting,
    variance,
    views,
    weight_norm,
)
"""Modules that fill the tables when they are imported, which is here."""


def rule_maker(op: Op) -> RuleMaker | None:
    """Return what makes the rule of a functional operator, if the table has one."""
    maker = RULES.get(op)
    if maker is not None:
        return maker
    if is_pointwise(op) or (is_foreach(op) and base_name(op) not in NOT_ELEMENTWISE):
        return pointwise.pointwise
    return None


def find_rule(op: Op, call: OpCall) -> Rule | None:
    """Return the rule of one call, if there is one."""
    maker = rule_maker(op)
    return None if maker is None else maker(call)
