"""Which placements files can name."""

from __future__ import annotations

from dtckpt.errors import Unsavable

from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.placement import HeadTail, Packed, Ragged, Shard, format_placements

IN_FORMAT = (Shard, Ragged, Packed, HeadTail)
"""Those that cut a dim. A class of anybody's own is stored as the ``Ragged`` of its sizes."""


def require_storable(layout: Layout) -> None:
    """Raise Unsavable where ranks hold several boxes by a placement that files have no name for."""
    for axis, placement in enumerate(layout.placements):
        is_dealt = any(c.axis == axis and c.order for cuts in layout.splits for c in cuts)
        if is_dealt and not isinstance(placement, IN_FORMAT):
            raise Unsavable(
                f"{placement} of ({format_placements(layout.placements)}) gives a rank several "
                "ranges of a dim, and a checkpoint has no name for it; redistribute to Shard or "
                "Packed first"
            )
