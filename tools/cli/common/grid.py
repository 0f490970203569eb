"""Aligned columns of text, printed as they are: rich's own tables take seconds for a large model.

Nothing is folded; a caller whose grid is wider than the console shows something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

Line = Sequence[tuple[str, str]]
"""Printable texts that follow one another, each with its style."""

_GAP = 2


def show(console: Console, *parts: Grid | Lines) -> None:
    """Print grids and lines one below the other; the terminal wraps what is too long for it."""
    console.print(*parts, end="", crop=False)


def plain(text: str, style: str = "") -> Line:
    """Return a line of one text."""
    return ((text, style),)


class Grid:
    """Rows of cells.

    Without ``headers`` the columns have no titles. Those in ``right`` are aligned to the right.
    """

    def __init__(self, *headers: str, right: Sequence[int] = ()) -> None:
        self._rows: list[tuple[Line, ...]] = []
        self._right = frozenset(right)
        if headers:
            self.add(*(plain(header, "bold") for header in headers))

    def add(self, *cells: Line) -> None:
        """Append a row; columns that it does not fill stay empty."""
        self._rows.append(cells)

    @property
    def width(self) -> int:
        """Columns of the terminal that the grid takes."""
        widths = self._widths()
        starts = [sum(widths[:i]) + _GAP * i for i in range(len(widths) + 1)]
        ends = (starts[len(row) - 1] + _cell_width(row[-1]) for row in self._rows if row)
        return max(starts[-1] - _GAP, *ends, 0)

    def _widths(self) -> list[int]:
        widths = [0] * max(map(len, self._rows), default=0)
        for row in self._rows:
            # The last cell of a short row runs on into the empty columns.
            for i, cell in enumerate(row if len(row) == len(widths) else row[:-1]):
                widths[i] = max(widths[i], _cell_width(cell))
        return widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        widths = self._widths()
        for row in self._rows:
            blank = 0
            for i, cell in enumerate(row):
                room = widths[i] - _cell_width(cell)
                before, after = (room, 0) if i in self._right else (0, room)
                blank += before
                if _cell_width(cell):  # blanks at the end of a line are never printed
                    yield Segment(" " * blank)
                    yield from _segments(console, cell)
                    blank = 0
                blank += after + _GAP
            yield Segment.line()


class Lines:
    """Lines of styled texts, printed as they are."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self._lines:
            yield from _segments(console, line)
            yield Segment.line()


def _segments(console: Console, line: Line) -> Iterator[Segment]:
    for text, style in line:
        yield Segment(text, console.get_style(style) if style else None)


def _cell_width(cell: Line) -> int:
    return sum(cell_len(text) for text, _ in cell)
