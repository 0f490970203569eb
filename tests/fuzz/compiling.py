"""Programs as functions for ``torch.compile``: all lines but those that ask for gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from dtckpt.dtensor.geometry.placement import parse_placements

from .program import Program, assigned_in, names_in

BACKEND = "aot_eager"


def compiled_lines(
    program: Program, namespace: dict[str, Any], distributed: bool
) -> tuple[Callable[..., dict[str, Any]], int]:
    """Return a compiled function of inputs and numbers, and how many lines it has.

    It returns all names that lines assign. Code is made anew, so no rank finds another one's graph.
    """
    count = _num_compiled(program)
    lines = program.lines[:count]
    own = dict(namespace)
    if distributed:
        lines = tuple(_with_placements(line, own) for line in lines)
    arguments = [*program.inputs, *program.runs[0]]
    assigned = list(dict.fromkeys(name for line in lines for name in assigned_in(line)))
    body = "".join(f"    {line}\n" for line in lines)
    found = ", ".join(f"{name!r}: {name}" for name in assigned)
    exec(f"def program({', '.join(arguments)}):\n{body}    return {{{found}}}\n", own)
    return torch.compile(own["program"], backend=BACKEND), count


def can_be_compiled(program: Program) -> bool:
    """Whether a graph can be expected: modules and optimizers are made by lines."""
    lines = program.lines[: _num_compiled(program)]
    names = {name for line in lines for name in names_in(line)}
    return bool(lines) and not names & {"module", "step", "whole"}


def _num_compiled(program: Program) -> int:
    for index, line in enumerate(program.lines):
        if "gradients(" in line or "accumulated(" in line:
            return index
    return len(program.lines)


def _with_placements(line: str, namespace: dict[str, Any]) -> str:
    """Return a line whose placements are values, which a graph takes for constants."""

    def put(match: re.Match[str]) -> str:
        name = f"_placements{len(namespace)}"
        namespace[name] = parse_placements(match[2])
        return f"{match[1]}.redistribute(placements={name})"

    return re.sub(r"redistribute\(([^,()]+), '([^']*)'\)", put, line)
