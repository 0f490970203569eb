"""Trying one operator: all its cases on all meshes, and what came of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .cases import NO_RULE, Case, NotWritten, by_rules, forward_backward, in_place, into_out
from .choices import choices_of
from .database import samples_of
from .expected import NOT_OUT, VALUES, Expected, Untestable, expect
from .outcome import RIGHT, Example, Failure, OpResult
from .team import Team

_WRITING_CHOICES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How thoroughly operators are tried."""

    sizes: tuple[str, ...] = ("even", "uneven")
    meshes: tuple[tuple[int, ...], ...] = ((4,), (2, 2))
    samples: int = 5
    choices: tuple[int, int] = (64, 10)
    """Most choices of placements for a sample on one axis, and on several."""
    seconds: float = 15.0
    """How long a rank waits for the others."""


def try_operator(
    name: str, info: Any, sizes: str, setting: Setting, teams: dict[tuple[int, ...], Team]
) -> OpResult:
    """Return what came of an operator of the database, whose sizes are set already."""
    start = time.monotonic()
    expected, reasons = _expectations(name, info, setting.samples)
    if not expected:
        reason = reasons[0] if reasons else "the database has no samples that run here"
        return OpResult(name=name, sizes=sizes, untestable=reason)
    tally = _Tally(compared={one.compared for one in expected})
    with _fallbacks() as gathered:
        for shape in setting.meshes:
            cases = _cases(info, expected, len(shape), setting, tally)
            found = teams[shape].run([case.step for case in cases])
            for case, failure in zip(cases, found, strict=False):
                tally.add(case, failure, shape)
    return OpResult(
        name=name,
        sizes=sizes,
        compared=tuple(sorted(tally.compared)),
        counts=tally.counts,
        writing=tally.writing,
        examples=tally.examples,
        runs=tally.way(gathered),
        gathered=tuple(sorted(gathered)),
        seconds=round(time.monotonic() - start, 2),
    )


@dataclass
class _Tally:
    """What has come of the cases of one operator so far."""

    compared: set[str]
    counts: dict[str, int] = field(default_factory=dict[str, int])
    writing: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, Example] = field(default_factory=dict[str, Example])
    needs_fallback: bool = False

    def add(self, case: Case, failure: Failure | None, shape: tuple[int, ...]) -> None:
        kind = RIGHT if failure is None else failure.kind
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.writing[kind] = self.writing.get(kind, 0) + case.writes
        if failure is not None and kind not in self.examples:
            label = f"mesh {'x'.join(map(str, shape))}, {case.label}"
            self.examples[kind] = Example(case=label, text=failure.text, where=failure.where)

    def note_fallback(self) -> None:
        self.needs_fallback = True

    def way(self, gathered: set[str]) -> str:
        if not self.counts.get(RIGHT):
            return ""
        return "fallback" if gathered else "decomposed" if self.needs_fallback else "rule"


def _expectations(name: str, info: Any, count: int) -> tuple[list[Expected], list[str]]:
    found: list[Expected] = []
    reasons: list[str] = []
    try:
        samples = samples_of(info, count)
    except Exception as error:  # the database's own code, which may need other devices
        return [], [f"the database makes no samples: {type(error).__name__}: {error}"]
    for sample in samples:
        try:
            found.append(expect(info, name, sample))
        except Untestable as reason:
            reasons.append(str(reason))
    return found, reasons


def _cases(
    info: Any, expected: list[Expected], axes: int, setting: Setting, tally: _Tally
) -> list[Case]:
    cases: list[Case] = []
    limit = setting.choices[0] if axes == 1 else setting.choices[1]
    for index, one in enumerate(expected):
        ndims = [tensor.ndim for tensor in one.sample.tensors]
        choices = choices_of(ndims, axes, limit, seed=index)
        label = f"sample {index} {_shapes(one)}"
        for number, choice in enumerate(choices):
            step = forward_backward(info, one, choice, number)
            if number == len(choices) - 1:
                step = by_rules(step, tally.note_fallback)
            cases.append(Case(f"{label} {_text(choice)}", step))
        if one.compared == VALUES:
            cases.extend(_in_place_cases(info, one, choices, label))
            try:
                cases.extend(_out_cases(info, one, choices, label))
            except NotWritten:
                tally.compared.add(NOT_OUT)
    return cases


def _in_place_cases(info: Any, expected: Expected, choices: list[Any], label: str) -> list[Case]:
    if info.inplace_variant is None:
        return []
    made = {c: in_place(info.inplace_variant, expected, c) for c in _few(choices)}
    return [
        Case(f"{label} {_text(c)} in place", step, writes=True) for c, step in made.items() if step
    ]


def _out_cases(info: Any, expected: Expected, choices: list[Any], label: str) -> list[Case]:
    if not info.supports_out:
        return []
    made = {c: into_out(info, expected, c) for c in _few(choices)}
    return [
        Case(f"{label} {_text(c)} with out=", step, writes=True) for c, step in made.items() if step
    ]


def _few(choices: list[Any]) -> list[Any]:
    return choices[:: -(-len(choices) // _WRITING_CHOICES)]


def _shapes(expected: Expected) -> str:
    return " ".join(str(list(tensor.shape)) for tensor in expected.sample.tensors)


def _text(choice: Any) -> str:
    return " ".join(f"({', '.join(map(str, placements))})" for placements in choice)


@contextmanager
def _fallbacks() -> Generator[set[str]]:
    """Within it, collect the operators that warn that they are gathered and run whole."""
    found: set[str] = set()

    def show(message: Any, *_: Any, **__: Any) -> None:
        name, mark, _rest = str(message).partition(NO_RULE)
        if mark:
            found.add(name.removeprefix("aten.").removesuffix(".default"))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield found
