"""What the values of tensors are like, for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..common.console import printable, stdout_console
from ..common.grid import Grid, Lines, plain, show

if TYPE_CHECKING:
    from ....checkpoint import Histogram, TensorStatistics

_MAX_ROWS = 32
_BAR_COLUMNS = 40
_MIN_BAR_COLUMNS = 8


def show_statistics(found: Iterable[TensorStatistics]) -> None:
    """Print a few lines and a histogram for each tensor."""
    console = stdout_console()
    for number, told in enumerate(found):
        if number:
            show(console, Lines([plain("")]))
        head = Grid()
        for label, text in _facts(told):
            head.add(plain(label, "bold"), plain(text))
        show(console, head)
        if told.histogram is not None:
            full = "#" if console.options.ascii_only else "\u2588"
            room = min(console.width - 40, _BAR_COLUMNS)
            show(console, Lines([plain("")]), _bars(told.histogram, full, room))


def _facts(told: TensorStatistics) -> Iterator[tuple[str, str]]:
    yield "tensor", printable(told.name)
    yield "values", f"{told.num_values:,} of {told.dtype}{list(told.shape)}"
    if told.histogram is not None:
        kind = "absolute value" if told.dtype.startswith("complex") else ""
        extremes = f"{number_text(told.min)} to {number_text(told.max)}"
        yield "range", f"{extremes}{', of ' + kind + 's' if kind else ''}"
        yield "mean", f"{number_text(told.mean)}, deviation {number_text(told.std)}"
    special = {
        "zero": told.num_zero,
        "NaN": told.num_nan,
        "+Inf": told.num_posinf,
        "-Inf": told.num_neginf,
    }
    yield "special", ", ".join(f"{number:,} {noun}" for noun, number in special.items())


def number_text(value: float | None) -> str:
    """Return a number in few digits; an int in all of them.

    >>> number_text(0.1234567), number_text(12345678), number_text(-5e-30)
    ('0.123457', '12345678', '-5e-30')
    """
    return str(value) if value is None or isinstance(value, int) else f"{value:.6g}"


def _bars(histogram: Histogram, full: str, room: int) -> Grid:
    """Return a line for each bin; pairs are joined where there are more than fit on a screen."""
    step = -(-len(histogram.counts) // _MAX_ROWS)
    counts = [sum(histogram.counts[i : i + step]) for i in range(0, len(histogram.counts), step)]
    edges = histogram.edges[::step]
    longest = max(1, *counts)
    columns = max(room, _MIN_BAR_COLUMNS)
    grid = Grid("from", "values", "", right=(0, 1))
    for edge, number in zip(edges, counts, strict=False):
        bar = full * -(-number * columns // longest)  # what is not empty is seen
        grid.add(plain(number_text(edge)), plain(f"{number:,}"), plain(bar, "cyan"))
    return grid
