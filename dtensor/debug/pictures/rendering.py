"""Pictures of layouts as text, in colours for a terminal, and as SVG."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from html import escape

from .picture import Band, Held, Panel, Picture

_COLOURS = (
    "#8ecae6",
    "#ffb703",
    "#90be6d",
    "#f28482",
    "#cdb4db",
    "#f9c74f",
    "#80cbc4",
    "#e0a96d",
    "#b5c99a",
    "#a2b9e9",
    "#ef9fbc",
    "#c9c9c9",
)
"""By the first rank of a cell; light enough for black text."""
_TERMINAL_COLOURS = (
    "cyan",
    "yellow",
    "green",
    "red",
    "magenta",
    "bright_yellow",
    "bright_cyan",
    "bright_red",
    "bright_green",
    "bright_blue",
    "bright_magenta",
    "white",
)
"""The same for terminals, of which all have these."""
_SKIPPED = "..."
_MAX_WIDTH = 640
_MAX_HEIGHT = 480
_LEAST_WIDTH, _LEAST_HEIGHT = 44, 22
_LETTER, _LINE, _MARGIN = 7, 18, 12


def as_text(pictures: Sequence[Picture]) -> str:
    """Return pictures drawn with plain characters."""
    return "\n\n".join("\n".join(_text_lines(picture)) for picture in pictures)


def _text_lines(picture: Picture) -> Iterator[str]:
    yield picture.title
    yield from (f"  {note}" for note in picture.notes)
    for panel in picture.panels:
        if panel.title:
            yield panel.title
        yield from _text_panel(panel, _corner(picture))
    if picture.left_out:
        yield picture.left_out


def _text_panel(panel: Panel, corner: str) -> Iterator[str]:
    table = _table(panel, corner)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    yield rule
    for row in table if corner else table[1:]:
        cells = (f" {text:<{width}} " for text, width in zip(row, widths, strict=True))
        yield "|".join(["", *cells, ""])
        yield rule


def _corner(picture: Picture) -> str:
    rows, columns = picture.dims
    return f"{rows} \\ {columns}" if rows else columns


def _table(panel: Panel, corner: str) -> list[list[str]]:
    """Return the texts of a panel; the first row is the header, which a number does not have."""
    header = [corner, *(_band_text(band) if corner else "" for band in panel.columns)]
    rows = zip(panel.rows, panel.cells, strict=True)
    has_rows = "\\" in corner
    labelled = ((_band_text(band) if has_rows else "rank", cells) for band, cells in rows)
    return [header, *([label, *map(_held_text, cells)] for label, cells in labelled)]


def _band_text(band: Band | None) -> str:
    return _SKIPPED if band is None else str(band)


def _held_text(held: Held | None) -> str:
    if held is None:
        return _SKIPPED
    return f"{held.text} (empty)" if held.is_empty else held.text


def _colour(held: Held | None, colours: Sequence[str] = _COLOURS) -> str | None:
    if held is None or held.is_empty or held.first_rank is None:
        return None
    return colours[held.first_rank % len(colours)]


def as_rich(pictures: Sequence[Picture]) -> str:
    """Return pictures with the escape sequences that colour them in a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, color_system="standard", width=10_000, highlight=False
    )
    for number, picture in enumerate(pictures):
        if number:
            console.print()
        console.print(Text(picture.title, style="bold"))
        for note in picture.notes:
            console.print(Text(f"  {note}"))
        for panel in picture.panels:
            header, *rows = _table(panel, _corner(picture))
            table = Table(title=Text(panel.title) if panel.title else None, show_header=any(header))
            for text in header:
                table.add_column(Text(text))
            for row, cells in zip(rows, panel.cells, strict=True):
                styles = [None, *(_colour(held, _TERMINAL_COLOURS) for held in cells)]
                table.add_row(
                    *(
                        Text(text, style=f"black on {colour}" if colour else "")
                        for text, colour in zip(row, styles, strict=True)
                    ),
                    end_section=True,
                )
            console.print(table)
        if picture.left_out:
            console.print(Text(picture.left_out, style="dim"))
    return out.getvalue().rstrip("\n")


def as_svg(pictures: Sequence[Picture]) -> str:
    """Return one SVG document with all pictures, parts drawn as large as they are."""
    canvas = _Canvas()
    for picture in pictures:
        canvas.line(picture.title, weight="bold")
        for note in picture.notes:
            canvas.line(note)
        for panel in picture.panels:
            if panel.title:
                canvas.line(panel.title)
            canvas.panel(panel, picture.dims)
        if picture.left_out:
            canvas.line(picture.left_out)
        canvas.y += _LINE
    return canvas.document()


class _Canvas:
    """Collects the elements of a document, from top to bottom."""

    def __init__(self) -> None:
        self.y = _MARGIN
        self._width = 0.0
        self._elements: list[str] = []

    def line(self, text: str, *, weight: str = "normal") -> None:
        """Write a line."""
        self._text(_MARGIN, self.y + _LINE / 2, text, f'font-weight="{weight}"')
        self.y += _LINE

    def panel(self, panel: Panel, dims: tuple[str, str]) -> None:
        """Draw a panel with the names of its bands."""
        texts = [[_held_text(held) for held in row] for row in panel.cells]
        least = [max(len(row[i]) for row in texts) * _LETTER + 10 for i in range(len(texts[0]))]
        widths = _extents(panel.columns, _MAX_WIDTH, least)
        heights = _extents(panel.rows, _MAX_HEIGHT, [_LEAST_HEIGHT] * len(panel.rows))
        labels = [_band_text(band) for band in panel.rows] if dims[0] else [""] * len(panel.rows)
        left = _MARGIN + max(map(len, [*labels, dims[0]])) * _LETTER + 8
        if dims[0]:
            self._text(_MARGIN, self.y + _LINE / 2, dims[0], 'fill="#666"')
        x = left
        for band, width in zip(panel.columns, widths, strict=True):
            if dims[1]:
                self._text(x + width / 2, self.y + _LINE / 2, _band_text(band), _MIDDLE)
            x += width
        if dims[1]:
            self._text(x + 8, self.y + _LINE / 2, dims[1], 'fill="#666"')
            self._width = max(self._width, x + 8 + len(dims[1]) * _LETTER)
        y = self.y + _LINE
        rows = zip(labels, texts, panel.cells, heights, strict=True)
        for label, row, cells, height in rows:
            self._text(_MARGIN, y + height / 2, label, "")
            x = left
            for text, held, width in zip(row, cells, widths, strict=True):
                self._cell(x, y, width, height, _colour(held))
                self._text(x + width / 2, y + height / 2, text, _MIDDLE)
                x += width
            y += height
        self.y = round(y) + _MARGIN

    def _cell(self, x: float, y: float, width: float, height: float, colour: str | None) -> None:
        dashes = "" if colour else ' stroke-dasharray="3 2"'
        self._elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour or "none"}" stroke="#333"{dashes}/>'
        )
        self._width = max(self._width, x + width)

    def _text(self, x: float, y: float, text: str, attributes: str) -> None:
        if text:
            self._elements.append(
                f'<text x="{x:.1f}" y="{y:.1f}" dominant-baseline="central" {attributes}>'
                f"{escape(text)}</text>"
            )
            if _MIDDLE not in attributes:
                self._width = max(self._width, x + len(text) * _LETTER)

    def document(self) -> str:
        """Return the document."""
        width, height = round(self._width) + _MARGIN, self.y
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="11">',
                f'<rect width="{width}" height="{height}" fill="white"/>',
                *self._elements,
                "</svg>",
            ]
        )


_MIDDLE = 'text-anchor="middle"'


def _extents(bands: Sequence[Band | None], most: int, least: Sequence[int]) -> list[float]:
    """Return the sizes of bands on the canvas: to scale, but none too small for its text."""
    sizes = [0 if band is None else band.end - band.start for band in bands]
    scale = most / max(sum(sizes), 1)
    floor = _LEAST_WIDTH if most == _MAX_WIDTH else _LEAST_HEIGHT
    return [max(size * scale, room, floor) for size, room in zip(sizes, least, strict=True)]
