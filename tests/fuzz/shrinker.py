"""The smallest program that shows a finding: what can go or be simpler is left out, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from dtckpt.dtensor.geometry.placement import format_placements, parse_placements
from dtckpt.errors import DtckptError

from .comparison import Finding
from .executors import Executor, Shown
from .program import Input, Program, assigned_in, names_in

Examine = Callable[[Program], Finding | None]


def shrink(
    program: Program, finding: Finding, examine: Examine, executor: Executor, trials: int = 150
) -> tuple[Program, Finding]:
    """Return a smaller program with a finding of the same kind, and that finding.

    Tries at most so many programs.
    """
    best, found = shortest_prefix(program, finding, examine)
    wanted = _sign(found)
    is_smaller = True
    tried = {repr(best)}
    while is_smaller and trials > 0:
        is_smaller = False
        for candidate in _simpler(best, executor):
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            trials -= 1
            if trials < 0:
                break
            other = _tried(examine, candidate)
            if other is not None and _sign(other) == wanted:
                best, found, is_smaller = candidate, other, True
                break
    return best, found


def _sign(finding: Finding) -> tuple[str, str]:
    """Return what must stay while a program gets smaller."""
    is_told = finding.kind in ("raises", "no error")
    return finding.kind, re.sub(r"[\d\W]+", " ", finding.text)[:40] if is_told else ""


def _tried(examine: Examine, program: Program) -> Finding | None:
    try:
        return examine(program)
    except (SyntaxError, DtckptError, ValueError, TypeError, RuntimeError, IndexError, KeyError):
        return None  # it is no program any more


def shortest_prefix(
    program: Program, finding: Finding, examine: Examine
) -> tuple[Program, Finding]:
    """Return the fewest first lines of a program that show a finding, whose cause is the last."""
    for count in range(1, len(program.lines)):
        shorter = replace(program, lines=program.lines[:count])
        found = _tried(examine, shorter)
        if found is not None:
            return shorter, found
    return program, finding


def _simpler(program: Program, executor: Executor) -> Iterator[Program]:
    """Yield programs that are simpler in one respect, those with fewer lines first."""
    yield from _with_fewer_runs(program)
    for index in reversed(range(len(program.lines) - 1)):
        lines = program.lines[:index] + program.lines[index + 1 :]
        yield replace(program, lines=lines)
    used = {name for line in program.lines for name in names_in(line)}
    kept = {name: value for name, value in program.inputs.items() if name in used}
    if len(kept) < len(program.inputs):
        yield replace(program, inputs=kept)
    yield from _with_inputs_for_lines(program, executor)
    yield from _with_same_inputs(program)
    yield from _on_smaller_meshes(program)
    for name, given in program.inputs.items():
        for other in _simpler_inputs(given):
            yield replace(program, inputs={**program.inputs, name: other})
    yield from _with_smaller_sizes(program)
    yield from _with_simpler_numbers(program)


def _with_fewer_runs(program: Program) -> Iterator[Program]:
    if program.compiled:
        if len(program.runs) > 2:
            for run in program.runs[1:]:
                yield replace(program, runs=(run, run))
    elif len(program.runs) > 1:
        for run in program.runs:
            yield replace(program, runs=(run,))
        if any(run != program.runs[0] for run in program.runs):
            yield replace(program, runs=(program.runs[0],) * len(program.runs))
    used = {name for line in program.lines for name in names_in(line)}
    if any(name not in used for run in program.runs for name in run):
        runs = tuple({k: v for k, v in run.items() if k in used} for run in program.runs)
        yield replace(program, runs=runs)


def _with_inputs_for_lines(program: Program, executor: Executor) -> Iterator[Program]:
    """Yield programs in which what a line makes is an input."""
    if len(program.lines) < 2:
        return
    try:
        traces = executor.run(replace(program, runs=program.runs[:1]))[0]
    except (RuntimeError, ValueError):
        return
    for index, line in enumerate(program.lines[:-1]):
        names = assigned_in(line)
        seen = traces[0].env.get(names[0]) if len(names) == 1 else None
        if not isinstance(seen, Shown) or not isinstance(seen.value, Tensor):
            continue
        placements = "" if seen.layout is None else format_placements(seen.layout.placements)
        dtype = str(seen.dtype).removeprefix("torch.")
        wants_grad = any(re.search(r"gradients\(|accumulated\(", line) for line in program.lines)
        can_grad = "float" in dtype or "complex" in dtype
        for values in ("mixed", "special"):
            made = Input(
                shape=seen.shape,
                dtype=dtype,
                placements=placements,
                values=values,
                grad=wants_grad and can_grad and values == "mixed",
            )
            lines = program.lines[:index] + program.lines[index + 1 :]
            yield replace(program, inputs={**program.inputs, names[0]: made}, lines=lines)


def _with_same_inputs(program: Program) -> Iterator[Program]:
    """Yield programs in which one input stands for two."""
    names = list(program.inputs)
    for position, name in enumerate(names):
        for other in names[:position]:
            if program.inputs[name].shape == program.inputs[other].shape:
                lines = tuple(re.sub(rf"\b{name}\b", other, line) for line in program.lines)
                kept = {k: v for k, v in program.inputs.items() if k != name}
                yield replace(program, inputs=kept, lines=lines)


def _on_smaller_meshes(program: Program) -> Iterator[Program]:
    if program.mesh == (2,):
        return
    for axis in range(len(program.mesh)):
        inputs = {
            name: replace(given, placements=_placement_at(given.placements, axis))
            for name, given in program.inputs.items()
        }
        lines = tuple(
            re.sub(r"(redistribute\(\S+|module\(.*?), '([^']*)'", _at_axis(axis), line)
            for line in program.lines
        )
        yield replace(program, mesh=(2,), inputs=inputs, lines=lines)


def _at_axis(axis: int) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{match[1]}, '{_placement_at(match[2], axis)}'"


def _placement_at(text: str, axis: int) -> str:
    if not text:
        return ""
    try:
        kept = parse_placements(text)[axis]
    except (DtckptError, IndexError):
        return text
    return str(kept).partition("@")[0]


def _simpler_inputs(given: Input) -> Iterator[Input]:
    if given.made_by:
        yield replace(given, made_by="")
    if given.strides != "rows":
        yield replace(given, strides="rows")
    if given.grad:
        yield replace(given, grad=False)
    if given.placements:
        parts = [str(p) for p in parse_placements(given.placements)]
        for index, part in enumerate(parts):
            for simpler in ("R", "S(0)"):
                if part not in ("R", simpler) and not (part == "S(0)" and simpler == "S(0)"):
                    shown = [*parts[:index], simpler, *parts[index + 1 :]]
                    yield replace(given, placements=", ".join(shown))
    if given.dtype != "float32":
        yield replace(given, dtype="float32")
        if given.dtype not in ("float64", "int64"):
            yield replace(given, dtype="int64")
    if given.values not in ("mixed", "ones"):
        yield replace(given, values="mixed")
    if given.seed:
        yield replace(given, seed=0)


def _with_smaller_sizes(program: Program) -> Iterator[Program]:
    sizes = {size for given in program.inputs.values() for size in given.shape if size > 1}
    for size in sorted(sizes, reverse=True):
        for smaller in (1, 2, 3):
            if smaller < size:
                inputs = {
                    name: replace(
                        given, shape=tuple(smaller if n == size else n for n in given.shape)
                    )
                    for name, given in program.inputs.items()
                }
                yield replace(program, inputs=inputs)
    for name, given in program.inputs.items():
        for index in range(len(given.shape)):
            shape = given.shape[:index] + given.shape[index + 1 :]
            yield replace(program, inputs={**program.inputs, name: replace(given, shape=shape)})
    dims = max((len(given.shape) for given in program.inputs.values()), default=0)
    if dims > 1:
        inputs = {
            name: replace(given, shape=given.shape[1:]) if len(given.shape) == dims else given
            for name, given in program.inputs.items()
        }
        yield replace(program, inputs=inputs)


def _with_simpler_numbers(program: Program) -> Iterator[Program]:
    for name in program.runs[0]:
        values: list[Any] = [run[name] for run in program.runs]
        for other in (2, 2.0):
            if any(value != other or type(value) is not type(other) for value in values):
                for index, value in enumerate(values):
                    if value in (1, 2) and type(value) in (int, float):
                        continue
                    runs = list(program.runs)
                    runs[index] = {**runs[index], name: other}
                    yield replace(program, runs=tuple(runs))
