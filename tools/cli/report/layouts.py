"""Which rank holds which box of a tensor, as numbers that a page draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....dtensor import IrregularLayout
from ..common.console import layout_text

if TYPE_CHECKING:
    from ....dtensor import Box, Layout

MAX_BOXES = 65_536
"""Of all layouts of a page; those that come later are told in words."""


class Layouts:
    """The layouts of a page, each once."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._room = MAX_BOXES

    def number(self, layout: Layout | IrregularLayout) -> int:
        """Return where a layout is in ``documents``, which it is added to if it is a new one."""
        # Meshes that differ in the names of their axes alone are equal.
        names = () if isinstance(layout, IrregularLayout) else layout.mesh.axis_names
        key = layout, names
        if key not in self._numbers:
            self._numbers[key] = len(self.documents)
            self.documents.append(self._document(layout))
        return self._numbers[key]

    def _document(self, layout: Layout | IrregularLayout) -> dict[str, Any]:
        """Return a layout in words, and its boxes with the ranks that hold them."""
        axes: list[tuple[str, int]] = []
        if isinstance(layout, IrregularLayout):
            num_boxes = len(layout.pieces)
        else:
            mesh, num_boxes = layout.mesh, layout.mesh.size
            axes = list(zip(mesh.axis_names, mesh.shape, strict=True))
        document: dict[str, Any] = {"text": layout_text(layout), "axes": axes, "boxes": None}
        if num_boxes <= self._room:
            self._room -= num_boxes
            document["boxes"] = [
                [*box.offsets, *box.sizes, ranks] for box, ranks in _ranks_of(layout).items()
            ]
            if axes:
                document["ranks"] = _numbering(layout)
        return document


def _ranks_of(layout: Layout | IrregularLayout) -> dict[Box, list[int]]:
    """Return the ranks that hold each box of a layout, empty ones left out."""
    found: dict[Box, list[int]] = {}
    if isinstance(layout, IrregularLayout):
        held = list(layout.pieces)
    else:
        ranks = layout.mesh.all_ranks()
        held = [(rank, box) for rank in ranks for box in layout.held_by(rank)]
    for rank, box in held:
        if box.numel:
            found.setdefault(box, []).append(rank)
    return found


def _numbering(layout: Layout | IrregularLayout) -> list[int] | None:
    """Return the ranks of a mesh in row-major order, where these do not count up from 0."""
    if isinstance(layout, IrregularLayout) or layout.mesh.ranks is None:
        return None
    return [layout.mesh.rank(at) for at in layout.mesh.coordinates()]
