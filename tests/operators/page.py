"""The page of documentation that a sweep writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from textwrap import fill

import torch

from .database import SIZES
from .outcome import KINDS, RIGHT, OpResult
from .summary import WAYS, Summary, summary_of
from .trial import Setting

_COMMAND = "python -m tests.operators"


def page(results: Sequence[OpResult], setting: Setting) -> str:
    """Return the page in Markdown."""
    parts = [
        _introduction(setting),
        "## Totals\n\n" + _totals(results, setting),
        "## Not entirely right\n\n" + _failing(results),
        "## How operators run\n\n" + _ways(results),
        "## Less than values compared\n\n" + _weaker(results),
        "## Not testable\n\n" + _untestable(results),
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _introduction(setting: Setting) -> str:
    sizes = " and ".join(
        f"{name} ({', '.join(f'{k}={v}' for k, v in SIZES[name].items())})"
        for name in setting.sizes
    )
    meshes = " and ".join("x".join(map(str, shape)) for shape in setting.meshes)
    options = f"--samples {setting.samples} --choices {setting.choices[0]}"
    made = (
        f"Generated on {datetime.now(UTC).date()} with torch {torch.__version__} by "
        f"`{_COMMAND} {options} --write docs/operators.md`; do not edit."
    )
    ranks = (
        "Every operator of torch's own operator database (`torch.testing`, `op_db`) is run on "
        "DTensors and compared with one device. Four ranks run as threads of one process, with "
        f"real Gloo groups, on meshes of {meshes} ranks."
    )
    cases = (
        f"Sample inputs have {sizes} sizes, beside those that the database writes out; up to "
        f"{setting.samples} samples of an operator are tried. Every tensor argument, also of "
        "integers and bools, is replicated and sharded along every dim: all combinations on one "
        f"axis up to {setting.choices[0]} for a sample, beyond that each argument alone, all "
        f"alike and a random choice; on two axes {setting.choices[1]} random ones. Compared are "
        "dtype, shape and values of every result and of the gradients of all inputs, on every "
        "rank, and the forms that write in place or to `out=` where there are such. An operator "
        "is *entirely right* if all of that is right in every case."
    )
    return "\n\n".join(["# Operators", *(fill(part, 100) for part in (made, ranks, cases))])


def _totals(results: Sequence[OpResult], setting: Setting) -> str:
    summaries = [summary_of(results, sizes) for sizes in setting.sizes]
    rows: list[list[str]] = [
        ["operators in the database", *(str(s.total) for s in summaries)],
        ["testable", *(str(s.testable) for s in summaries)],
        ["**entirely right**", *(f"**{s.right}** ({_percent(s.right, s)})" for s in summaries)],
    ]
    rows.append(
        ["the same without forms that write in place or to `out=`"]
        + [f"{s.returns_right} ({_percent(s.returns_right, s)})" for s in summaries]
    )
    rows.extend(
        [_MEANINGS[kind], *(str(s.kinds.get(kind, 0)) for s in summaries)] for kind in KINDS[1:]
    )
    rows.extend(
        [f"run {text}", *(str(s.ways.get(way, 0)) for s in summaries)] for way, text in WAYS.items()
    )
    rows.append(["cases", *(f"{s.cases:,}" for s in summaries)])
    return _table(["", *(s.sizes for s in summaries)], rows)


def _percent(count: int, summary: Summary) -> str:
    return f"{100 * count / max(1, summary.testable):.1f} %"


_MEANINGS = {
    "refused": "refused: a stated error, the same on all ranks, in some case",
    "error": "another error, the same on all ranks, in some case",
    "wrong": "a wrong value in some case",
    "divergent": "ranks disagree on an error in some case",
    "hang": "ranks wait for each other in some case",
    "crash": "the process dies",
}


def _failing(results: Sequence[OpResult]) -> str:
    failing: dict[str, list[OpResult]] = {}
    for result in results:
        if not result.untestable and result.worst != RIGHT:
            failing.setdefault(result.name, []).append(result)
    if not failing:
        return "None."
    rows = [_failing_row(name, found) for name, found in sorted(failing.items())]
    return _table(["operator", "sizes", "right cases", "reason, with the first such case"], rows)


def _failing_row(name: str, results: Sequence[OpResult]) -> list[str]:
    worst = max(results, key=lambda result: KINDS.index(result.worst))
    example = worst.examples[worst.worst]
    right = sum(result.counts.get(RIGHT, 0) for result in results)
    share = f"{right} of {sum(sum(result.counts.values()) for result in results)}"
    reason = f"{worst.worst}: {_cell(example.text)} ({_cell(example.case)})"
    return [f"`{name}`", ", ".join(result.sizes for result in results), share, reason]


def _ways(results: Sequence[OpResult]) -> str:
    parts: list[str] = []
    for way, text in WAYS.items():
        named: dict[str, set[str]] = {}
        for result in results:
            if _worst_way(result.name, results) == way:
                named.setdefault(result.name, set()).update(result.gathered)
        listed = [
            f"`{name}`" + (f" ({', '.join(sorted(steps))})" if steps else "")
            for name, steps in sorted(named.items())
        ]
        parts.append(f"**Run {text}** ({len(listed)}): {', '.join(listed) or 'none'}.")
    return "\n\n".join(parts)


def _worst_way(name: str, results: Sequence[OpResult]) -> str:
    ways = [result.runs for result in results if result.name == name and result.runs]
    return max(ways, key=list(WAYS).index, default="")


def _weaker(results: Sequence[OpResult]) -> str:
    found: dict[str, set[str]] = {}
    for result in results:
        for compared in result.compared:
            if compared != "values":
                found.setdefault(compared, set()).add(result.name)
    return _by_reason(found)


def _untestable(results: Sequence[OpResult]) -> str:
    found: dict[str, set[str]] = {}
    for result in results:
        if result.untestable:
            found.setdefault(_cell(result.untestable), set()).add(result.name)
    return _by_reason(found)


def _by_reason(found: dict[str, set[str]]) -> str:
    rows = [
        [reason, ", ".join(f"`{name}`" for name in sorted(names))]
        for reason, names in sorted(found.items())
    ]
    return _table(["reason", "operators"], rows) if rows else "None."


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]
