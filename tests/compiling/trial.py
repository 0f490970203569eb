"""Cases tried by processes, one per rank; where one ends a rank the next ones get new processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..processes import run_processes


class Case(NamedTuple):
    """A model or function, the parts that ranks hold, what is run, and what compiles it."""

    name: str
    parts: str
    mode: str
    backend: str


class Outcome(NamedTuple):
    """What is wrong with a case, nothing where it is right."""

    case: Case
    told: tuple[str, ...]
    seconds: float
    """Processor time of one rank."""


def try_cases(cases: Sequence[Case], ranks: int, seconds: float = 120) -> Iterator[Outcome]:
    """Yield what comes of each case, each of which may take so long."""
    left = list(cases)
    while left:
        found = _try_together(left, ranks, seconds * len(left))
        yield from found
        left = left[len(found) :]


def _try_together(cases: Sequence[Case], ranks: int, seconds: float) -> list[Outcome]:
    """Return the outcomes of the first cases, up to one that ends its ranks."""
    error = ""
    try:
        texts = run_processes("tests.compiling.ranks", ranks, json.dumps(cases), timeout=seconds)
    except AssertionError as failed:
        texts, error = [str(failed)], str(failed)
    by_case: dict[Case, Outcome] = {}
    for line in "\n".join(texts).splitlines():
        if line.startswith("[["):
            case, told, took = json.loads(line)
            before = by_case.get(key := Case(*case))
            every = dict.fromkeys([*(before.told if before else ()), *told])
            by_case[key] = Outcome(key, tuple(every), took)
    found: list[Outcome] = []
    for case in cases:
        outcome = by_case.get(case)
        if outcome is None:
            if error:
                found.append(Outcome(case, (error[-2000:],), 0))
            break
        found.append(outcome)
    return found
