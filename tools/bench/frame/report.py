"""What rows measured as tables: one a row, and one of all bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .output import facts_text
from .row import Bar, Column, Outcome, Row
from .table import Grid, show, verdict

_MISSING = "-"


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

    def grid(self) -> Grid:
        """Return one line for every system."""
        return Grid(
            title=self.row.title,
            facts=facts_text(self.outcome.facts),
            what=self.row.what,
            headings=("system", *(column.heading for column in self.row.columns)),
            rows=tuple((system, *self.cells(system)) for system in self.row.systems),
        )

    def verdicts(self) -> Iterable[tuple[str, ...]]:
        """Yield row, what, measured, limit and verdict of every bar."""
        for bar in self.row.bars:
            measured, holds = bar.measure(self.outcome.values), bar.holds(self.outcome.values)
            amounts = (self._amount(bar, value) for value in (measured, bar.limit))
            yield self.row.name, self._what(bar), *amounts, verdict(holds)

    def _what(self, bar: Bar) -> str:
        heading = next(c.heading for c in self.row.columns if c.metric == bar.metric)
        return f"{heading} / {bar.against}" if bar.against else heading

    def _amount(self, bar: Bar, value: float | None) -> str:
        if value is None:
            return _MISSING
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
                    "measured": bar.measure(self.outcome.values),
                    "holds": bar.holds(self.outcome.values),
                }
                for bar in self.row.bars
            ],
        }


def grids(results: Sequence[Result]) -> list[Grid]:
    """Return one table per row and one of all bars."""
    bars = Grid(
        title="Bars",
        headings=("row", "what", "measured", "at most", ""),
        rows=tuple(told for result in results for told in result.verdicts()),
        texts=2,
    )
    return [*(result.grid() for result in results), bars]
