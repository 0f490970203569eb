"""Matrix products: the contracted factor leaves a Partial sum."""

from __future__ import annotations

import torch

from ..schemas import base_name
from .factors import Dim, Dims, Factors, dim_of, numbered
from .table import OpCall, Rule, rule

aten = torch.ops.aten

_EITHER = (frozenset({0}), frozenset({1}))


@rule(aten.mm.default)
def mm(call: OpCall) -> Rule:
    """Matrix times matrix."""
    return _product(call, "ik", "kj", "ij")


@rule(aten.bmm.default)
def bmm(call: OpCall) -> Rule:
    """Batches of matrices."""
    return _product(call, "bik", "bkj", "bij")


@rule(aten.mv.default)
def mv(call: OpCall) -> Rule:
    """Matrix times vector."""
    return _product(call, "ik", "k", "i")


@rule(aten.dot.default, aten.vdot.default)
def dot(call: OpCall) -> Rule:
    """Vector times vector."""
    return _product(call, "k", "k", "")


@rule(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def added_products(call: OpCall) -> Rule:
    """A product and an addend that broadcasts to it and counts once."""
    left, right, out = {
        "addmm": ("ik", "kj", "ij"),
        "baddbmm": ("bik", "bkj", "bij"),
        "addmv": ("ik", "k", "i"),
    }[base_name(call.op)]
    a, b, c = numbered(left, right, out)
    addend = call.specs[0]
    first = call.outputs[0]
    shape = first.shape if first else ()
    lead = len(c) - addend.ndim
    added: Dims = tuple(
        c[lead + i] if size == shape[lead + i] else None for i, size in enumerate(addend.shape)
    )
    return Rule(
        rows=Factors(
            call=call,
            inputs=(added, a, b),
            outputs=(c,),
            reduce=_contracted(a, c),
            addends=frozenset({0}),
            linear=(frozenset({0, 1}), frozenset({0, 2})),
        )
    )


def _product(call: OpCall, left: str, right: str, out: str) -> Rule:
    a, b, c = numbered(left, right, out)
    return Rule(
        rows=Factors(
            call=call, inputs=(a, b), outputs=(c,), reduce=_contracted(a, c), linear=_EITHER
        )
    )


def _contracted(left: Dims, out: Dims) -> dict[int, str]:
    factors = [dim.factor for dim in left if isinstance(dim, Dim)]
    return {factor: "sum" for factor in factors if dim_of(out, factor) is None}
