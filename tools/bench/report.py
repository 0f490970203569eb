"""Results for people: a table per row, the bars, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from dtckpt.tools.cli.console import iec

from .row import OURS, Bar, Column, Kind, Outcome, Row

_MISSING = "-"
_SIZES = ("size", "state_bytes", "memory_bytes", "local_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row and what it measured."""

    row: Row
    outcome: Outcome

    def cells(self, system: str) -> list[str]:
        """Return what a system measured, one text per column; a reason where it did not."""
        values = self.outcome.values.get(system)
        if values is None:
            reason = self.outcome.skipped.get(system, "not measured")
            return [reason.splitlines()[0], *[""] * (len(self.row.columns) - 1)]
        return [self._cell(values.get(c.metric), c) for c in self.row.columns]

    def _cell(self, found: list[float] | None, column: Column) -> str:
        if not found:
            return _MISSING
        if column.kind == "range":
            return f"{min(found):.3f} - {max(found):.3f}"
        return show(median(found), column.kind)

    def systems(self) -> list[str]:
        """Return all systems of the row, in its order."""
        return list(self.row.systems)

    def verdicts(self) -> Iterable[tuple[str, str, str, bool | None]]:
        """Yield (what, measured, limit, whether it holds) of every bar."""
        for bar in self.row.bars:
            measured = bar.measure(self.outcome.values)
            yield (
                self._what(bar),
                _MISSING if measured is None else self._amount(bar, measured),
                self._amount(bar, bar.limit),
                None if measured is None else measured <= bar.limit,
            )

    def _what(self, bar: Bar) -> str:
        heading = next(c.heading for c in self.row.columns if c.metric == bar.metric)
        return f"{heading} / {bar.against}" if bar.against else heading

    def _amount(self, bar: Bar, value: float) -> str:
        if bar.against is not None:
            return show(value, "ratio")
        return show(value, next(c.kind for c in self.row.columns if c.metric == bar.metric))

    def to_json(self) -> dict[str, Any]:
        """Return everything that was measured, and the bars."""
        return {
            "title": self.row.title,
            "what": self.row.what,
            "values": self.outcome.values,
            "medians": {
                system: {metric: median(found) for metric, found in values.items()}
                for system, values in self.outcome.values.items()
            },
            "skipped": self.outcome.skipped,
            "facts": self.outcome.facts,
            "bars": [
                {
                    "metric": bar.metric,
                    "against": bar.against,
                    "limit": bar.limit,
                    "measured": (measured := bar.measure(self.outcome.values)),
                    "holds": None if measured is None else measured <= bar.limit,
                }
                for bar in self.row.bars
            ],
        }


def show(value: float, kind: Kind) -> str:
    """Return a number for people.

    >>> show(0.5, "seconds"), show(0.5, "ratio"), show(2e9, "rate"), show(3e-5, "microseconds")
    ('0.500 s', '0.50', '2.00 GB/s', '30.0 us')
    """
    match kind:
        case "seconds":
            return f"{value:.3f} s"
        case "microseconds":
            return f"{value * 1e6:.1f} us"
        case "bytes":
            return iec(int(value))
        case "rate":
            return f"{value / 1e9:.2f} GB/s"
        case "ratio" | "range":
            return f"{value:.2f}"


def print_results(console: Console, results: Iterable[Result]) -> None:
    """Print one table per row and one of all bars."""
    results = list(results)
    for result in results:
        table = Table(
            title=result.row.title, title_justify="left", caption=_facts(result.outcome.facts)
        )
        table.add_column("system")
        for column in result.row.columns:
            table.add_column(column.heading, justify="right")
        for system in result.systems():
            table.add_row(system, *result.cells(system), style="bold" if system == OURS else None)
        console.print(table)
    bars = Table(title="Bars", title_justify="left")
    for heading in ("row", "what", "measured", "at most", ""):
        bars.add_column(heading, justify="left" if heading in ("row", "what", "") else "right")
    for result in results:
        for what, measured, limit, holds in result.verdicts():
            style = {True: "green", False: "red", None: "dim"}[holds]
            bars.add_row(result.row.name, what, measured, limit, _verdict(holds), style=style)
    console.print(bars)


def markdown(machine: dict[str, Any], setting: dict[str, Any], results: Iterable[Result]) -> str:
    """Return the tables as Markdown."""
    results = list(results)
    lines = [
        f"Machine: {_facts(machine)}.",
        "",
        f"Run: {_facts({key: value for key, value in setting.items() if key != 'directory'})}.",
    ]
    for result in results:
        headings = [column.heading for column in result.row.columns]
        lines += ["", f"**{result.row.title}** ({_facts(result.outcome.facts)})", ""]
        lines += [result.row.what, ""]
        lines += _lines(["system", *headings])
        lines += [_line([system, *result.cells(system)]) for system in result.systems()]
    lines += ["", "**Bars**", "", *_lines(["row", "what", "measured", "at most", ""])]
    for result in results:
        for what, measured, limit, holds in result.verdicts():
            lines.append(_line([result.row.name, what, measured, limit, _verdict(holds)]))
    return "\n".join(lines) + "\n"


def _lines(headings: list[str]) -> list[str]:
    return [_line(headings), _line(["---"] * len(headings))]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _verdict(holds: bool | None) -> str:
    return {True: "pass", False: "MISS", None: "not measured"}[holds]


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(_fact(key, value) for key, value in facts.items())


def _fact(key: str, value: Any) -> str:
    return f"{key.removesuffix('_bytes')} {iec(value) if key in _SIZES else value}"
