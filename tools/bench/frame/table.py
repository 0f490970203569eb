"""Tables of text, for a console and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from dtckpt.tools.cli.common.console import iec

from .timing import OURS

MISS = "MISS"

Kind = Literal[
    "seconds", "milliseconds", "microseconds", "bytes", "rate", "ratio", "range", "count"
]
"""How a metric is shown: its median in a unit, or the ``range`` of its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of text."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    """So many columns at the start are text, the others are numbers."""
    facts: str = ""
    """What else is worth knowing of it."""
    what: str = ""
    """How it was measured; in Markdown alone."""

    def markdown(self) -> str:
        """Return it as Markdown."""
        rules = ["---" if i < self.texts else "---:" for i in range(len(self.headings))]
        body = "".join(f"| {' | '.join(line)} |\n" for line in (self.headings, rules, *self.rows))
        title = f"**{self.title}** ({self.facts})" if self.facts else f"**{self.title}**"
        return "\n\n".join(filter(None, (title, self.what, body)))

    def rich(self) -> Table:
        """Return it as a table for a console."""
        table = Table(title=self.title, title_justify="left", caption=self.facts or None)
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if i < self.texts else "right")
        for row in self.rows:
            style = "bold" if OURS in row else ("red" if MISS in row[-1] else None)
            table.add_row(*row, style=style)
        return table


def verdict(holds: bool | None) -> str:
    """Return what is said of a bar; None where it was not measured."""
    return {True: "pass", False: MISS, None: "not measured"}[holds]


def show(value: float, kind: Kind) -> str:
    """Return a number for people.

    >>> show(0.5, "seconds"), show(0.5, "ratio"), show(2e9, "rate"), show(3e-5, "microseconds")
    ('0.500 s', '0.50', '2.00 GB/s', '30.0 us')
    """
    match kind:
        case "seconds":
            return f"{value:.3f} s"
        case "milliseconds":
            return f"{value * 1e3:.1f} ms"
        case "microseconds":
            return f"{value * 1e6:.1f} us"
        case "bytes":
            return iec(int(value))
        case "rate":
            return f"{value / 1e9:.2f} GB/s"
        case "count":
            return f"{value:.0f}"
        case "ratio" | "range":
            return f"{value:.2f}"
