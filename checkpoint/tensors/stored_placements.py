"""Which placements files can name."""

from __future__ import annotations

from dtckpt.errors import Unsavable

from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.placement import HeadTail, Packed, Ragged, Shard, format_placements

IN_FORMAT = (Shard, Ragged, Packed, HeadTail)
"""Those that cut a dim. A class of anybody's own is stored as the ``Ragged`` of its sizes."""


def require_storable(layout: Layout) -> None:
    """Raise Unsavable where ranks hold several boxes by a placement that files have no name for."""
    if not layout.is_dealt:
        return
    for order, cuts in zip(layout.orders, layout.splits, strict=True):
        placement = None if order is None else layout.placements[cuts[0].axis]
        if placement is not None and not isinstance(placement, IN_FORMAT):
            raise Unsavable(
                f"{placement} of ({format_placements(layout.placements)}) gives a rank several "
                "ranges of a dim, and a checkpoint has no name for it; redistribute to Shard or "
                "Packed first"
            )
