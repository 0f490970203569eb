"""Writes that torch refuses: to elements that share one place in memory, and of other shapes.

All is decided by shape and strides of the whole, so that ranks agree: a kernel sees nothing of it
where a part has one element, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtckpt.errors import UnsupportedOp

from ..mesh.spec import DTensorSpec, TensorMeta
from ..ops import rule_maker
from ..ops.pointwise import pointwise_rule
from ..tensor.schemas import Op, base_name, functional_of, is_foreach
from .binding import Bound

_REFUSED_NAMES = (
    "addmm addr cumprod cumsum index_add index_copy index_reduce masked_scatter put renorm scatter"
    " scatter_add scatter_reduce bernoulli cauchy exponential geometric log_normal normal random"
    " uniform"
)
_REFUSED = frozenset(_REFUSED_NAMES.split())
"""Operators that are not pointwise and that torch has not write such tensors."""


def refuse_overlap(bound: Bound) -> None:
    """Raise RuntimeError as torch does where an operator in place writes to such a tensor.

    Operators that write one value to all elements pass.
    """
    op, first = bound.call.op, bound.call.args[0]
    written = bound.specs[: len(first) if isinstance(first, list) else 1]
    if not any(spec.expanded_dims for spec in written):
        return
    if base_name(op).removesuffix("_") in _REFUSED:
        raise RuntimeError(
            f"{op}({written[0]}): unsupported operation: more than one element of the written-to "
            "tensor refers to a single memory location; clone() the tensor before"
        )
    functional = functional_of(op)
    if is_foreach(op) or (functional is not None and rule_maker(functional) is pointwise_rule):
        args, kwargs = bound.call.replaced(_stand_ins(bound))
        bound.call.op(*args, **kwargs)


def _stand_ins(bound: Bound) -> list[Tensor]:
    """Return numbers, and two elements in one place of memory for the tensors that have such."""
    made: dict[int, Tensor] = {}
    for leaf, spec in zip(bound.leaves, bound.specs, strict=True):
        one = torch.ones((), dtype=spec.dtype)
        made[id(leaf)] = one.expand(2) if spec.expanded_dims else one
    return [made[id(leaf)] for leaf in bound.leaves]


def refuse_other_shape(op: Op, specs: Sequence[DTensorSpec], made: TensorMeta | None) -> None:
    """Raise RuntimeError as torch does where the result of an operator in place has another shape.

    Torch's functions for tensors without data pass some that have more dims of one index.
    """
    written, functional = specs[0], functional_of(op)
    shape = written.shape if made is None else made.shape
    if functional is not None and rule_maker(functional) is pointwise_rule:
        shape = torch.broadcast_shapes(*[spec.shape for spec in specs])
    if shape != written.shape:
        raise RuntimeError(
            f"{op}: output with shape {list(written.shape)} doesn't match the broadcast shape "
            f"{list(shape)}; reshape what it is computed with, or use the operator that returns a "
            "new tensor"
        )


def refuse_moved_overlap(op: Op, source: DTensorSpec, written_back: Sequence[object]) -> None:
    """Raise UnsupportedOp where such a tensor is moved to be written: its memory is not moved."""
    if written_back and source.expanded_dims:
        raise UnsupportedOp(
            f"{op} writes to {source}, of which several elements share memory, and has to "
            "redistribute it; redistribute the tensor before it is expanded, or write to a clone()"
        )
