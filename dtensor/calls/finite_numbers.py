"""Numbers that terms of a sum cannot be scaled by one by one.

A sum may be scaled by scaling its terms, unless the number is infinite, or a zero that divides: of
terms that are 0, or of unlike signs, that makes not-a-number where the sum itself is a number. A
plan is made for all numbers of a type, so it is the local kernel that looks at them. They are equal
on all ranks, which then reduce the sum first, all alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..ops import rule_maker
from ..ops.pointwise import pointwise_rule
from ..redistribute import redistribute_local
from ..tensor.arguments import collect_tensors, substituted
from ..tensor.schemas import Op, base_name, functional_of, is_foreach, is_in_place
from .call import Call
from .fastest import fastest

_DIVISIONS = frozenset({"div", "div_", "_foreach_div", "_foreach_div_"})
_PRODUCTS = frozenset({"addbmm", "addmm", "addmv", "addr", "baddbmm"})
"""Operators that scale a product, and an addend that is zeros on all ranks but one."""


def scaling(
    call: Call,
    run: Callable[..., Any],
    inputs: Sequence[DTensorSpec],
    outputs: Sequence[DTensorSpec | None],
) -> Callable[..., Any]:
    """Return ``run``, or where it scales terms by numbers, what looks at these first."""
    op = call.op
    divides, is_product = base_name(op) in _DIVISIONS, base_name(op).removesuffix("_") in _PRODUCTS
    # By its rule: torch has no tag for all that are pointwise (rsub).
    by_elements = rule_maker(functional_of(op) or op) is pointwise_rule
    scales = by_elements or is_foreach(op) or is_product
    if not scales or not _has_number([call.args, call.kwargs], with_bools=divides):
        return run
    if not any(spec is not None and spec.layout.is_partial for spec in outputs):
        return run
    if run is op:
        run = fastest(op, call.args, call.kwargs)
    if len(call.args) == 2 and not call.kwargs and type(call.args[1]) in (bool, int, float):
        spoiling = (math.inf, -math.inf, 0) if divides else (math.inf, -math.inf)

        def looking_at_one(tensor: Any, number: Any) -> Any:
            if number in spoiling:
                return _reduced_first(op, (tensor, number), {}, inputs, outputs)
            return run(tensor, number)

        return looking_at_one

    def looking(*args: Any, **kwargs: Any) -> Any:
        if _spoils(args, divides) or (kwargs and _spoils(kwargs.values(), divides)):
            return _reduced_first(op, args, kwargs, inputs, outputs)
        return run(*args, **kwargs)

    return looking


def _has_number(values: Any, *, with_bools: bool) -> bool:
    if isinstance(values, dict):
        values = list(cast("dict[str, Any]", values).values())
    if isinstance(values, list | tuple):
        listed = cast("Sequence[Any]", values)
        return any(_has_number(value, with_bools=with_bools) for value in listed)
    return isinstance(values, int | float | complex) and (with_bools or type(values) is not bool)


def _spoils(values: Any, divides: bool) -> bool:
    """Whether one of some arguments, or of a list among them, is such a number."""
    for value in values:
        kind = type(value)
        if kind is float:
            if math.isinf(value) or (divides and value == 0):
                return True
        elif kind is int or kind is bool:
            if divides and value == 0:
                return True
        elif kind is complex:
            if math.isinf(abs(value)) or (divides and value == 0):
                return True
        elif kind is list and _spoils(value, divides):
            return True
    return False


def _reduced_first(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[DTensorSpec],
    outputs: Sequence[DTensorSpec | None],
) -> Any:
    """Return terms of what the operator makes of the sums: one rank has it, the others zeros."""
    given: list[Tensor] = []
    collect_tensors([*args, *kwargs.values()], given)
    # Of matrices that are cut where they are multiplied parts have terms, too.
    is_product = base_name(op).removesuffix("_") in _PRODUCTS
    wanted = DTensorSpec.replicated if is_product else DTensorSpec.reduced
    pairs = zip(given, inputs, strict=True)
    wholes = [redistribute_local(local, spec, wanted(spec)) for local, spec in pairs]
    whole_args, whole_kwargs = substituted(args, kwargs, wholes)
    results = (functional_of(op) or op)(*whole_args, **whole_kwargs)
    listed: list[Tensor] = [results] if isinstance(results, Tensor) else list(results)
    # What is written in place is of the dtype of its target, whatever is computed.
    terms = [
        made if spec is None else redistribute_local(made.to(spec.dtype), wanted(spec), spec)
        for made, spec in zip(listed, outputs, strict=True)
    ]
    if not is_in_place(op):
        return terms[0] if isinstance(results, Tensor) else terms
    targets = args[0] if isinstance(args[0], list) else [args[0]]
    for target, term in zip(cast("list[Tensor]", targets), terms, strict=True):
        target.copy_(term)
    return args[0]
