"""Pointwise operators: every dim of the broadcast result is a factor."""

from __future__ import annotations

import torch

from ..schemas import base_name
from ..spec import DTensorSpec
from .factors import LINEAR_OPS, Dim, Dims, Factors
from .table import OpCall, Rule, rule

aten = torch.ops.aten

_ALL_TOGETHER = frozenset({"add", "sub", "_foreach_add", "_foreach_sub", "copy", "_foreach_copy"})
"""Linear in all tensors at once, and not in a constant beside them."""

_FIRST_ONLY = frozenset({"div", "_foreach_div"})
"""Linear in the first tensor, whatever it is divided by."""

_ANY_ONE = frozenset({"mul", "_foreach_mul"})
"""Linear in each tensor alone."""

_UNARY = frozenset(
    {
        "neg",
        "positive",
        "clone",
        "detach",
        "alias",
        "zero",
        "lift_fresh",
        "conj_physical",
        "_conj",
        "real",
        "imag",
        "_foreach_neg",
        "_foreach_zero",
        "zeros_like",
    }
)
"""Linear in their tensor."""

_MONOTONE = frozenset({"clone", "detach", "alias", "lift_fresh", "_to_copy"})
"""Copies: they keep every kind of Partial."""


@rule(
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten._to_copy.default,
    aten.copy.default,
    aten.zero.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
)
def pointwise(call: OpCall) -> Rule:
    """Return the rule of an operator whose inputs broadcast to its outputs."""
    first = call.outputs[0]
    ndim = len(first.shape) if first else 0
    shape = tuple(first.shape) if first else ()
    return Rule(
        rows=Factors(
            call=call,
            inputs=tuple(broadcast_dims(spec, shape) for spec in call.specs),
            outputs=(tuple(Dim(i) for i in range(ndim)),) * len(call.outputs),
            linear=_linear_sets(call),
            linear_ops=_linear_ops(call),
        )
    )


def broadcast_dims(spec: DTensorSpec, shape: tuple[int, ...]) -> Dims:
    """Return the factors of an input that broadcasts to ``shape``: its dims from the right."""
    lead = len(shape) - spec.ndim
    return tuple(
        Dim(lead + i) if lead + i >= 0 and size == shape[lead + i] else None
        for i, size in enumerate(spec.shape)
    )


def _linear_sets(call: OpCall) -> tuple[frozenset[int], ...]:
    name, count = base_name(call.op), len(call.specs)
    every = frozenset(range(count))
    has_constant = count < _num_operands(call)
    if name in _UNARY or (name in _MONOTONE and _keeps_linearity(call)):
        return (every,)
    if name in _ALL_TOGETHER:
        casts = name in ("copy", "_foreach_copy") and not _keeps_linearity(call)
        return () if has_constant or casts else (every,)
    if name in _FIRST_ONLY:
        tensor_first = isinstance(call.args[0], DTensorSpec)
        rounded = call.kwargs.get("rounding_mode") is not None
        return (frozenset({0}),) if tensor_first and not rounded else ()
    if name in _ANY_ONE:
        return tuple(frozenset({i}) for i in range(count))
    return ()


def _linear_ops(call: OpCall) -> tuple[str, ...]:
    if base_name(call.op) in _MONOTONE and _keeps_linearity(call):
        return ("sum", "avg", "product", "max", "min")
    return LINEAR_OPS


def _keeps_linearity(call: OpCall) -> bool:
    """Whether a copy does not round: a cast to integers of a sum is no sum of casts."""
    first = call.outputs[0]
    source = call.specs[-1].dtype  # of a copy into another tensor, that which is copied
    return first is not None and (first.dtype == source or first.dtype.is_floating_point)


def _num_operands(call: OpCall) -> int:
    return 1 if len(call.args) < 2 else 2
