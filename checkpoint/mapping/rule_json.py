"""Rules as JSON, and back: the names of fields are those of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from ..state.limits import list_of, object_of, shown, text_of
from .changes import MappingRule
from .copies_rule import Copies
from .dequantize import Dequantize
from .part_rules import Merge, Split, Stack, Unstack
from .rules import Crop, Drop, Move, Pad, Permute, Reshape

_KINDS: dict[str, type[Any]] = {
    rule.kind: rule
    for rule in (
        Copies,
        Crop,
        Dequantize,
        Drop,
        Merge,
        Move,
        Pad,
        Permute,
        Reshape,
        Split,
        Stack,
        Unstack,
    )
}


def rule_to_json(rule: MappingRule) -> dict[str, Any]:
    """Return a JSON object: the kind, and all that is not as usual."""
    if isinstance(rule, Copies):
        return {"rule": rule.kind, **rule.to_json()}
    told: dict[str, Any] = {"rule": rule.kind}
    for field in fields(cast(Any, rule)):
        value = getattr(rule, field.name)
        if value != field.default:
            told[field.name] = list(value) if isinstance(value, tuple) else value
    return told


def rule_of_json(value: object) -> MappingRule:
    """Return what ``rule_to_json`` wrote; ValueError, TypeError or LookupError if malformed."""
    told: Mapping[str, Any] = object_of(value, "a rule")
    kind = text_of(told["rule"], "the kind of a rule")
    if kind not in _KINDS:
        raise ValueError(f"there is no rule {shown(kind)}; there are {', '.join(_KINDS)}")
    if kind == Copies.kind:
        return Copies.from_json(told)
    made = _KINDS[kind]
    known = {field.name: field for field in fields(made)}
    for name in told:
        if name != "rule" and name not in known:
            raise ValueError(f"{kind} takes no {shown(name)}, but {', '.join(known)}")
    for name, field in known.items():
        if name not in told and field.default is MISSING:
            raise ValueError(f"{kind} needs {name}")
    return made(
        **{n: _field(known[n].type, told[n], f"{n} of {kind}") for n in told if n != "rule"}
    )


def _field(kind: Any, value: object, what: str) -> Any:
    """Return the value of a field, whose type is known by its annotation."""
    if value is None and "None" in kind:
        return None
    if "tuple" in kind:
        items = list_of(value, what)
        return tuple(_field(kind.partition("[")[2], item, what) for item in items)
    if kind.startswith("str"):
        return text_of(value, what)
    if type(value) is not int:
        raise TypeError(f"{what} is {shown(value)}, expected an int")
    return value
