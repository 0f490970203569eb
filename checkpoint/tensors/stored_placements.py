"""Which placements files can name."""

from __future__ import annotations

from dtckpt.errors import Unsavable

from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.placement import (
    HeadTail,
    Packed,
    Placement,
    Ragged,
    Shard,
    SplitPlacement,
    format_placements,
)

_CUTS = (Shard, Ragged, Packed, HeadTail)
"""Those that cut a dim. A class of anybody's own is stored as the ``Ragged`` of its sizes."""


def is_in_format(placement: Placement) -> bool:
    """Whether files have a name for a placement."""
    return not isinstance(placement, SplitPlacement) or isinstance(placement, _CUTS)


def num_ranges(placement: Placement, count: int) -> int:
    """Return how many ranges so many coordinates hold by a placement that files state in few bytes.

    None for those that give a coordinate one.
    """
    if isinstance(placement, Packed):
        return len(placement.sizes) * count
    return 2 * count if isinstance(placement, HeadTail) else 0


def require_storable(layout: Layout) -> None:
    """Raise Unsavable where ranks hold several boxes by a placement that files have no name for."""
    if not layout.is_dealt:
        return
    for order, cuts in zip(layout.orders, layout.splits, strict=True):
        if order is not None and not is_in_format(placement := layout.placements[cuts[0].axis]):
            raise Unsavable(
                f"{placement} of ({format_placements(layout.placements)}) gives a rank several "
                "ranges of a dim, and a checkpoint has no name for it; redistribute to Shard or "
                "Packed first"
            )
