"""One process that draws, runs and shrinks programs, and writes what it sees, one JSON a line."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from dtckpt.checkpoint.state.collector import paused_collector

from .comparison import Finding, examine
from .compiling import can_be_compiled
from .executors import Executor
from .generator import program_of, seeded
from .program import Program, operator_of
from .shrinker import shrink

if TYPE_CHECKING:
    from .session import Settings

SHRINKS_OF_A_KIND = 1
"""Further findings at the same operator and of the same kind are counted, not shrunk."""
_PROGRAMS_BETWEEN_COLLECTIONS = 200


def work(settings: Settings, numbers: Iterable[int] | None, out: TextIO) -> None:
    """Run the programs of these numbers, all of this worker's where there are none."""
    faulthandler.enable()
    seeded()
    executor = Executor()
    seen: Counter[tuple[str, str]] = Counter()

    def tell(**entry: Any) -> None:
        out.write(json.dumps(entry) + "\n")
        out.flush()

    if numbers is None:
        numbers = itertools.count(settings.start, settings.jobs)
    began = time.monotonic()
    with paused_collector():
        for count, number in enumerate(numbers):
            if time.monotonic() - began > 60 * settings.minutes:
                break
            tell(at=number)
            program = program_of(settings.seed, number, settings.only)
            verdict = examine(program, executor)
            if (
                verdict.finding is None
                and is_compiled(settings, number)
                and can_be_compiled(program)
            ):
                first, *others = program.runs
                program = replace(program, runs=(first, first, *others), compiled=True)
                verdict = examine(program, executor)
            entry: dict[str, Any] = {"ran": number, "lines": verdict.lines_run}
            if verdict.refusal is not None:
                entry["refused"] = [verdict.refusal.operator, verdict.refusal.text[:120]]
            if verdict.finding is not None:
                line = program.lines[min(verdict.finding.line, len(program.lines) - 1)]
                early = (verdict.finding.kind, operator_of(line))
                seen[early] += 1
                if seen[early] <= SHRINKS_OF_A_KIND:
                    entry["found"] = _shrunk(program, verdict.finding, executor)
                    entry["cpu_seconds"] = round(time.process_time(), 1)
            tell(**entry)
            if count % _PROGRAMS_BETWEEN_COLLECTIONS == 0:
                gc.collect()


def is_compiled(settings: Settings, number: int) -> bool:
    """Whether a program is also compiled, which takes some 20 times as long."""
    share = settings.compiled
    return share > 0 and int(number * share) != int((number + 1) * share)


def _shrunk(program: Program, finding: Finding, executor: Executor) -> dict[str, Any]:
    def again(candidate: Program) -> Finding | None:
        return examine(candidate, executor).finding

    small, found = shrink(program, finding, again, executor)
    warm = ("compiled " if small.compiled else "warm ") if found.run else ""
    return {
        "kind": warm + found.kind,
        "operator": operator_of(small.lines[-1]) if small.lines else "",
        "text": found.text,
        "program": repr(small),
    }
