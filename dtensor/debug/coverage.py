"""How operators run on distributed tensors."""

from __future__ import annotations

from typing import Literal

from ..ops import rule_maker
from ..ops.engine.table import ACROSS_MESHES, DECOMPOSITIONS, RULES
from ..tensor.schemas import Op, functional_of
from ..torch_private import decompositions, is_composite, operators

Way = Literal["rule", "decomposition", "parts", "whole"]


def op_coverage(namespace: str = "aten") -> dict[str, Way]:
    """Return how every operator of a namespace runs, by its full name.

    "decomposition" by one of this library, "rule" by a sharding rule, "parts" by the operators that
    torch makes of it, "whole" on gathered tensors, with a warning. A decomposition or rule may
    decline a call, which then goes on down this list; docs/operators.md has what was tried.
    Operators in place and with ``out=`` run as the functional ones do.
    """
    return {str(op): _way(op) for op in operators(namespace)}


def _way(op: Op) -> Way:
    functional = functional_of(op) or op
    forms = {op, functional}
    if not forms.isdisjoint(RULES.by_users):
        return "rule"
    if any(form in DECOMPOSITIONS or form in ACROSS_MESHES for form in forms):
        return "decomposition"
    if any(rule_maker(form) is not None for form in forms):
        return "rule"
    if any(is_composite(form) or form in decompositions() for form in forms):
        return "parts"
    return "whole"
