"""What a reshard would mean for rules and ranks, worked out from the new layouts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....dtensor import IrregularLayout

if TYPE_CHECKING:
    from ....checkpoint import Placed, Rule


def unused(placed: Sequence[Placed], rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules that place no tensor."""
    used = {item.rule for item in placed}
    return [rule for rule in rules if rule not in used]


def bytes_by_rank(placed: Sequence[Placed]) -> dict[int, int]:
    """Return how many bytes of tensors every rank will hold."""
    held: dict[int, int] = {}
    alike = Counter((item.layout, item.tensor.dtype.itemsize) for item in placed)
    for (layout, itemsize), times in alike.items():
        if isinstance(layout, IrregularLayout):
            boxes = list(layout.pieces)
        else:
            mesh = layout.mesh
            boxes = [(mesh.rank(at), layout.box(at)) for at in mesh.coordinates()]
        for rank, box in boxes:
            held[rank] = held.get(rank, 0) + box.numel * itemsize * times
    return dict(sorted(held.items()))
