"""What a picture of a layout shows: panels of cells with the ranks that hold them. Pure values.

A tensor of more than two dims is cut into panels, one for each combination of pieces of its leading
dims. Of what there is much of, the first and the last are shown, and what is left out is counted,
so a layout on thousands of ranks costs no more than what is shown of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...geometry.box import Box
from ...geometry.irregular import IrregularLayout
from ...geometry.layout import Cell, Layout
from ...geometry.mesh import unravel
from ...geometry.placement import Partial, Placement

T = TypeVar("T")

_MAX_LISTED = 4
"""Of ranks along one axis, or sizes, more than these are shown by the first two and the last."""
_MAX_SIZES = 8
_TERMS = {"sum": " + ", "product": " * "}


@dataclass(frozen=True, slots=True)
class Band:
    """Indices ``start`` to ``end`` of a dim, which some ranks hold."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    @property
    def is_empty(self) -> bool:
        """Whether there are no indices in it."""
        return self.start == self.end


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds a cell."""

    text: str
    """Ranks: copies with commas between them, terms of a Partial with their operation."""
    first_rank: int | None
    """What the cell is coloured by; None where nobody holds it."""
    is_empty: bool = False
    """Whether the cell has no elements."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Two dims of a tensor; None stands for what is left out."""

    title: str
    """Which part of the leading dims it is; empty where there are none."""
    rows: tuple[Band | None, ...]
    columns: tuple[Band | None, ...]
    cells: tuple[tuple[Held | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All there is to be drawn of one layout."""

    title: str
    notes: tuple[str, ...]
    """What every mesh axis does, one line each."""
    dims: tuple[str, str]
    """Names of the dims along rows and columns, empty for those that the tensor lacks."""
    panels: tuple[Panel, ...]
    left_out: str
    """What is not shown; empty where everything is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is shown at most; at least 3 of each."""

    rows: int = 16
    columns: int = 8
    panels: int = 8

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.panels) < 3:
            raise ValueError(f"a picture shows at least 3 rows, columns and panels, got {self}")


def picture_of(layout: Layout | IrregularLayout, limits: Limits) -> Picture:
    """Return the picture of a layout."""
    if isinstance(layout, Layout):
        cells = _Irregular(_pieces_of(layout)) if layout.is_dealt else _Regular(layout)
        title, notes = _title(layout), tuple(_notes(layout))
    else:
        cells = _Irregular(layout)
        title = f"{list(layout.shape)} in {len(layout.boxes()):,} boxes"
        notes = ()
    counts = cells.counts()
    ndim = len(counts)
    lead, tail = counts[: max(ndim - 2, 0)], counts[max(ndim - 2, 0) :]
    num_rows, num_columns = ((1, 1, *tail))[-2:]
    rows, columns = _shown(num_rows, limits.rows), _shown(num_columns, limits.columns)
    num_panels = math.prod(lead)
    shown = [i for i in _shown(num_panels, limits.panels) if i is not None]
    panels = tuple(_panel(cells, unravel(i, lead), rows, columns, ndim) for i in shown)
    left_out = [
        f"{there - here:,} of {there:,} {what}"
        for there, here, what in (
            (num_panels, len(shown), "panels"),
            (num_rows, len([r for r in rows if r is not None]), "rows of parts"),
            (num_columns, len([c for c in columns if c is not None]), "columns of parts"),
        )
        if here < there
    ]
    return Picture(
        title=title,
        notes=notes,
        dims=(f"dim {ndim - 2}" if ndim > 1 else "", f"dim {ndim - 1}" if ndim else ""),
        panels=panels,
        left_out=f"not shown: {', '.join(left_out)}" if left_out else "",
    )


def _title(layout: Layout) -> str:
    placements = ", ".join(placement.label for placement in layout.placements)
    return f"{list(layout.shape)} ({placements}) on {layout.mesh}"


def _panel(
    cells: _Regular | _Irregular,
    lead: tuple[int, ...],
    rows: Sequence[int | None],
    columns: Sequence[int | None],
    ndim: int,
) -> Panel:
    def band(dim: int, index: int | None) -> Band | None:
        if index is None:
            return None
        return cells.band(dim, index) if dim >= 0 else Band(0, 1)

    before = [cells.band(dim, index) for dim, index in enumerate(lead)]
    row_bands = tuple(band(ndim - 2, i) for i in rows)
    column_bands = tuple(band(ndim - 1, i) for i in columns)

    def held(row: int | None, column: int | None) -> Held | None:
        if row is None or column is None:
            return None
        cell = (*lead, row, column)[-ndim:] if ndim else ()
        is_empty = any(cells.band(dim, index).is_empty for dim, index in enumerate(cell))
        return Held(*cells.holders(cell), is_empty)

    return Panel(
        title=f"[{', '.join([*map(str, before), ':', ':'])}]" if before else "",
        rows=row_bands,
        columns=column_bands,
        cells=tuple(tuple(held(row, column) for column in columns) for row in rows),
    )


def _shown(count: int, limit: int) -> list[int | None]:
    """Return the indices that are shown of ``count``, with None for those in between."""
    if count <= limit:
        return list(range(count))
    last = (limit - 1) // 2
    return [*range(limit - 1 - last), None, *range(count - last, count)]


class _Regular:
    """The cells of a layout on a mesh: how many pieces each dim has, a piece, who holds a cell."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def counts(self) -> tuple[int, ...]:
        return self._layout.grid

    def band(self, dim: int, index: int) -> Band:
        cell = [0] * len(self._layout.shape)
        cell[dim] = index
        box = self._layout.cell_box(tuple(cell))
        return Band(box.offsets[dim], box.offsets[dim] + box.sizes[dim])

    def holders(self, cell: Cell) -> tuple[str, int | None]:
        """Return who holds a cell, and the first rank of them."""
        layout = self._layout
        at = list(layout.coordinate(cell))
        first = layout.mesh.rank(tuple(at))
        return self._listed(at, layout.replica_axes), first

    def _listed(self, at: list[int], axes: Sequence[int]) -> str:
        """Return the ranks at a coordinate along the axes that cut nothing."""
        if not axes:
            return str(self._layout.mesh.rank(tuple(at)))
        axis, rest = axes[0], axes[1:]
        placement = self._layout.placements[axis]

        def part(index: int) -> str:
            there = [*at[:axis], index, *at[axis + 1 :]]
            text = self._listed(there, rest)
            return f"({text})" if self._is_joined(rest) else text

        count = self._layout.mesh.shape[axis]
        if not isinstance(placement, Partial):
            return _joined(part, count, ", ")
        if placement.reduce_op in _TERMS:
            return _joined(part, count, _TERMS[placement.reduce_op])
        return f"{placement.reduce_op}({_joined(part, count, ', ')})"

    def _is_joined(self, axes: Sequence[int]) -> bool:
        """Whether the text of ranks along these axes needs brackets inside of a longer one."""
        if not axes or all(self._layout.mesh.shape[axis] == 1 for axis in axes):
            return False
        first = self._layout.placements[axes[0]]
        return not isinstance(first, Partial) or first.reduce_op in _TERMS


def _joined(part: Callable[[int], str], count: int, separator: str) -> str:
    if count <= _MAX_LISTED:
        return separator.join(map(part, range(count)))
    return separator.join([part(0), part(1), "...", part(count - 1)])


def _notes(layout: Layout) -> Iterator[str]:
    mesh = layout.mesh
    width = max(len(f"{name}={n}") for name, n in zip(mesh.axis_names, mesh.shape, strict=True))
    for axis, placement in enumerate(layout.placements):
        name = f"{mesh.axis_names[axis]}={mesh.shape[axis]}"
        yield f"{name:<{width}}  {_said(layout, axis, placement)}"


def _said(layout: Layout, axis: int, placement: Placement) -> str:
    count = layout.mesh.shape[axis]
    if isinstance(placement, Partial):
        return f"{placement}: {count:,} terms, to be reduced by {placement.reduce_op}"
    if placement.is_replicate():
        return f"R: {count:,} copies" if count > 1 else "R: 1 copy"
    dim = next(d for d in range(len(layout.shape)) if placement.is_shard(d))
    cuts = [split.axis for split in layout.splits[dim]]
    text = f"{placement.label}: cuts dim {dim}"
    starts = layout.splits[dim][cuts.index(axis)].starts
    if starts is not None:
        sizes = [str(end - start) for start, end in itertools.pairwise(starts)]
        if len(sizes) > _MAX_SIZES:
            sizes = [*sizes[: _MAX_SIZES - 1], "...", sizes[-1]]
        text += f" into {', '.join(sizes)}"
    return text if len(cuts) == 1 else f"{text}, as number {cuts.index(axis) + 1} of {len(cuts)}"


def _pieces_of(layout: Layout) -> IrregularLayout:
    """Return the boxes of a layout of which a rank may hold several."""
    ranks = layout.all_ranks()
    pieces = ((rank, box) for rank in ranks for box in layout.held_by(rank))
    return IrregularLayout(layout.shape, tuple(pieces))


class _Irregular:
    """The cells between all starts and ends of boxes."""

    def __init__(self, layout: IrregularLayout) -> None:
        self._pieces = layout.pieces
        self._edges: list[list[int]] = []
        for dim, size in enumerate(layout.shape):
            edges = {0, size}
            for _, box in layout.pieces:
                edges |= {box.offsets[dim], box.offsets[dim] + box.sizes[dim]}
            self._edges.append(sorted(edges))

    def counts(self) -> tuple[int, ...]:
        return tuple(max(len(edges) - 1, 1) for edges in self._edges)

    def band(self, dim: int, index: int) -> Band:
        edges = self._edges[dim]
        return Band(edges[index], edges[min(index + 1, len(edges) - 1)])

    def holders(self, cell: Cell) -> tuple[str, int | None]:
        bands = [self.band(dim, index) for dim, index in enumerate(cell)]
        box = Box(tuple(b.start for b in bands), tuple(b.end - b.start for b in bands))
        ranks = [rank for rank, held in self._pieces if not box.is_empty and held.contains(box)]
        if not ranks:
            return "nobody", None
        return _joined(lambda i: str(ranks[i]), len(ranks), ", "), ranks[0]


def caption(text: str) -> Picture:
    """Return what stands between pictures: a line of text."""
    return Picture(title=text, notes=(), dims=("", ""), panels=(), left_out="")


def grouped(layouts: Sequence[tuple[str, T]]) -> list[tuple[T, list[str]]]:
    """Return every different layout once, with the names of those that have it."""
    found: dict[T, list[str]] = {}
    for name, layout in layouts:
        found.setdefault(layout, []).append(name)
    return list(found.items())


def first_and_last(items: Sequence[str], limit: int) -> str:
    """Return texts with commas between them, of many the first ones and the number of the rest."""
    shown = ", ".join(itertools.islice(items, limit))
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit:,} more"


def printable(text: str) -> str:
    r"""Return text that cannot steer a terminal.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
