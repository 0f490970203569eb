"""How much of a state each rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout


def bytes_by_rank(tensors: Iterable[tuple[Layout | IrregularLayout, int]]) -> dict[int, int]:
    """Return how many bytes every rank holds of tensors, given as layout and bytes an element."""
    held: dict[int, int] = {}
    for (layout, itemsize), times in Counter(tensors).items():
        if isinstance(layout, IrregularLayout):
            boxes = list(layout.pieces)
        else:
            mesh = layout.mesh
            boxes = [(mesh.rank(at), layout.box(at)) for at in mesh.coordinates()]
        for rank, box in boxes:
            held[rank] = held.get(rank, 0) + box.numel * itemsize * times
    return dict(sorted(held.items()))
