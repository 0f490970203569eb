"""Rules that several families have, and what these are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...geometry.placement import REDUCE_OPS
from ...mesh.spec import DTensorSpec
from ...tensor.schemas import base_name
from .dims import all_dims, dims_of, without
from .factors import FIRST, LINEAR_OPS, Dims, Factors
from .local_kernels import zeros_if_some_empty
from .table import LocalMaker, OpCall, Rule


def needs_whole(call: OpCall, local: LocalMaker | None = None) -> Rule:
    """Return the rule of an operator that needs all of every tensor."""
    inputs = tuple((None,) * spec.ndim for spec in call.specs)
    outputs = tuple((None,) * len(meta.shape) if meta else () for meta in call.outputs)
    return Factors(call, inputs, outputs, local=local)


def moving(
    call: OpCall,
    inputs: tuple[Dims, ...],
    outputs: tuple[Dims, ...],
    local: LocalMaker | None = None,
    linear_ops: tuple[str, ...] = REDUCE_OPS,
) -> Rule:
    """Return the rule of an operator that moves elements and does not compute with their values.

    Terms of all its tensors give a term of each output.
    """
    return Factors(
        call,
        inputs,
        outputs,
        linear=(frozenset(range(len(inputs))),),
        linear_ops=linear_ops,
        local=local,
    )


def picking(
    call: OpCall, inputs: tuple[Dims, ...], output: Dims, picked: Sequence[int], local: LocalMaker
) -> Rule:
    """Return the rule of an operator that picks elements of its first tensor, along some dims.

    ``picked`` are the factors of these. A rank that does not have an element has a zero term.
    """
    cost = bytes_to_reduce(call.specs[0], call.outputs[0])
    return Factors(
        call,
        inputs,
        (output,),
        reduce=dict.fromkeys(picked, "sum"),
        reduce_bytes=dict.fromkeys(picked, cost),
        linear=FIRST,
        linear_ops=REDUCE_OPS,
        local=local,
        positions=frozenset(picked),
    )


def alike(
    call: OpCall,
    dims: Dims,
    *,
    linear: tuple[frozenset[int], ...] = (),
    local: LocalMaker | None = None,
) -> Rule:
    """Return the rule of an operator all of whose tensors have the same dims."""
    inputs, outputs = (dims,) * len(call.specs), (dims,) * len(call.outputs)
    return Factors(call, inputs, outputs, linear=linear, local=local)


def bytes_to_reduce(source: DTensorSpec, output: Any) -> tuple[float, ...]:
    """Return, per mesh axis, the bytes that a rank receives when an output is reduced over it."""
    size = output.shape.numel() * output.dtype.itemsize if output else 0
    return tuple(2 * size * (count - 1) / count for count in source.mesh.shape)


def named_dims(call: OpCall) -> tuple[int, ...]:
    """Return the dims that a reduction is over, wherever the operator has that argument."""
    return dims_of(call.specs[0], call.arg("dim", "dims"))


_OF_SOME = frozenset({"max", "min", "median", "mode", "nanmedian"})
"""Reductions that return an element, which kernels refuse to look for in a dim without any."""


def over_whole_dims(call: OpCall) -> Rule:
    """Return the rule of a reduction whose dims must be whole.

    Most have a decomposition beside it for dims that are not.
    """
    source, dims = call.specs[0], named_dims(call)
    is_of_some = base_name(call.op) in _OF_SOME and call.arg("dim") is not None
    if is_of_some and 0 in [source.shape[dim] for dim in dims if source.ndim]:
        raise IndexError(
            f"{call.op}({source}): Expected reduction dim {dims[0]} to have non-zero size; check "
            "numel() before"
        )
    kept, left = without(source.ndim, *dims)
    outputs = tuple(kept if m and len(m.shape) == len(kept) else left for m in call.outputs)
    return Factors(call, (kept,), outputs, local=zeros_if_some_empty)


def along_whole_dims(call: OpCall) -> Rule:
    """Return the rule of an operator along dims that must be whole; all tensors have the same."""
    return alike(call, without(call.specs[0].ndim, *named_dims(call))[0])


def reducing(
    call: OpCall, reduce_op: str, *, linear: bool = True, local: LocalMaker | None = None
) -> Rule:
    """Return the rule of a reduction: an axis that cuts a dim of it leaves a Partial result."""
    dims, first = named_dims(call), call.outputs[0]
    kept, left = without(call.specs[0].ndim, *dims)
    keeps_dims = first is not None and len(first.shape) == len(kept)
    return Factors(
        call,
        (all_dims(len(kept)),),
        (kept if keeps_dims else left,),
        reduce=dict.fromkeys(dims, reduce_op),
        linear=FIRST if linear else (),
        linear_ops=LINEAR_OPS if reduce_op == "sum" else (reduce_op,),
        local=local,
    )
