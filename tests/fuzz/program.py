"""Programs as values: inputs, lines of Python that call torch, and the numbers of each run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

STRIDES = ("rows", "transposed", "stepped", "stepped_rows", "offset", "expanded")
"""How an input, or each local part of it, lies in memory; not in rows is part of a larger buffer,
transposed, or the same row again and again."""


BY_PARTS = "from_local of parts alone"
UNTOLD = "from_local without strides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input: a DTensor where it has placements, else a plain tensor that all ranks have."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    placements: str = ""
    """As ``format_placements`` writes them, one for each mesh dim."""
    values: str = "mixed"
    seed: int = 0
    strides: str = "rows"
    grad: bool = False
    made_by: str = ""
    """``distribute_tensor``, or ``from_local`` without a shape; else with shape and strides, or, of
    ``UNTOLD`` strides, with a shape: such a DTensor is row-major to those that view it."""

    def __repr__(self) -> str:
        shown = [f"shape={self.shape}"]
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                shown.append(f"{name}={value!r}")
        return f"Input({', '.join(shown)})"


_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "placements": "",
    "values": "mixed",
    "seed": 0,
    "strides": "rows",
    "grad": False,
    "made_by": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Lines that run on each rank, with DTensors for some inputs, and on one device.

    ``runs`` has the values of the names that stand for numbers, for each run: the first is cold,
    the next ones find what the first has cached.
    """

    mesh: tuple[int, ...] = (2,)
    inputs: dict[str, Input]
    lines: tuple[str, ...] = field(default_factory=tuple)
    runs: tuple[dict[str, Any], ...] = ({},)
    compiled: bool = False
    """Whether the runs after the first are of the compiled program."""

    def __repr__(self) -> str:
        inputs = "".join(f"        {name!r}: {value!r},\n" for name, value in self.inputs.items())
        lines = "".join(f"        {line!r},\n" for line in self.lines)
        text = f"Program(\n    mesh={self.mesh},\n    inputs={{\n{inputs}    }},\n"
        text += f"    lines=(\n{lines}    ),\n"
        if self.runs != ({},):
            text += f"    runs={_runs_text(self.runs)},\n"
        if self.compiled:
            text += "    compiled=True,\n"
        return text + ")"


def _runs_text(runs: tuple[dict[str, Any], ...]) -> str:
    shown = [
        "{" + ", ".join(f"{name!r}: {number_text(value)}" for name, value in run.items()) + "}"
        for run in runs
    ]
    return f"({', '.join(shown)},)"


def number_text(value: Any) -> str:
    """Return Python text of a number; not-a-number and infinity as the names that lines have."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return "nan" if value != value else repr(value)


@lru_cache(4096)
def code_of(line: str) -> Any:
    """Return the compiled code of a line."""
    return compile(line, "<program>", "exec")


@lru_cache(4096)
def names_in(line: str) -> frozenset[str]:
    """Return the names that a line reads or writes."""
    return frozenset(n.id for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Name))


@lru_cache(4096)
def assigned_in(line: str) -> tuple[str, ...]:
    """Return the names that a line assigns."""
    return tuple(
        n.id
        for n in ast.walk(ast.parse(line))
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )


@lru_cache(4096)
def changed_in(line: str) -> tuple[str, ...]:
    """Return the names that a line assigns; of a write in place all that it has."""
    return assigned_in(line) or tuple(sorted(names_in(line)))


_OPERATORS = {
    "Add": "+", "Sub": "-", "Mult": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**",
    "MatMult": "@", "Lt": "<", "Gt": ">", "LtE": "<=", "GtE": ">=", "Eq": "==", "NotEq": "!=",
    "BitAnd": "&", "BitOr": "|", "BitXor": "^", "LShift": "<<", "RShift": ">>",
    "USub": "neg", "Invert": "~",
}  # fmt: skip


@lru_cache(4096)
def operator_of(line: str) -> str:
    """Return what a line calls, in one word, by which findings are grouped."""
    statement = ast.parse(line).body[-1]
    if isinstance(statement, ast.With):
        statement = statement.body[0]
    if isinstance(statement, ast.AugAssign):
        return _OPERATORS[type(statement.op).__name__] + "="
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
        if isinstance(target, ast.Subscript):
            return "setitem"
        if isinstance(target, ast.Attribute):
            return f"{target.attr}="
    value = getattr(statement, "value", None)
    return _operator_of_value(value) if value is not None else type(statement).__name__


def _operator_of_value(value: ast.AST) -> str:
    while isinstance(value, ast.Subscript) and isinstance(value.value, ast.Call):
        value = value.value
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func)
        name = re.sub(r"\(.*\)", "", called.rpartition(".")[2])
        if ".data." in called:
            name = f"data.{name}"
        if value.keywords and any(k.arg in ("out", "dtype") for k in value.keywords):
            name += "".join(f",{k.arg}=" for k in value.keywords if k.arg in ("out", "dtype"))
        return name
    if isinstance(value, ast.BinOp | ast.UnaryOp):
        return _OPERATORS.get(type(value.op).__name__, type(value.op).__name__)
    if isinstance(value, ast.Compare):
        return _OPERATORS.get(type(value.ops[0]).__name__, type(value.ops[0]).__name__)
    if isinstance(value, ast.Subscript):
        return "getitem"
    if isinstance(value, ast.Attribute):
        return value.attr
    return type(value).__name__
