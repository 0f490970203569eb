"""Irregular layouts: an explicit list of the boxes that ranks hold.

For tensors whose placement no mesh arithmetic describes (packed expert weights, foreign tensor
types that only tell their chunks). The cost grows with the number of boxes, so a ``Layout`` is
used wherever one exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import gt
from typing import Any, cast

from dtckpt.errors import PlacementError

from .box import Box, first_overlap, is_tiled
from .integers import integer, ints

_FEW_BOXES = 64
"""So many are compared with one another; of more, their corners are counted."""
_SOME_BOXES = 1024
"""So many are searched for two that overlap, to name them in an error."""


@dataclass(frozen=True, slots=True)
class IrregularLayout:
    """A tensor of ``shape`` of which every listed rank holds the listed box.

    A rank may hold several boxes. Ranks that hold the same box are replicas of it; different boxes
    must not overlap, and together they must cover the tensor.

    >>> layout = IrregularLayout((4,), ((0, Box((0,), (3,))), (1, Box((3,), (1,)))))
    >>> [(rank, str(common)) for rank, _, common in layout.pieces_meeting(Box((2,), (2,)))]
    [(0, '[2:3]'), (1, '[3:4]')]
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, Box], ...]
    """(rank, box) pairs; empty boxes are left out and the rest is sorted."""

    def __post_init__(self) -> None:
        if any(not 0 <= size < 1 << 63 for size in self.shape):
            raise PlacementError(f"a tensor cannot have the shape {self.shape}")
        pieces = sorted(
            {(rank, box) for rank, box in self.pieces if not box.is_empty},
            key=lambda piece: (piece[1].offsets, piece[1].sizes, piece[0]),
        )
        object.__setattr__(self, "pieces", tuple(pieces))

    def boxes(self) -> list[Box]:
        """Return every different box once, in row-major order of its offsets."""
        return [box for _, box in self.distinct_pieces()]

    def distinct_pieces(self) -> Iterator[tuple[int, Box]]:
        """Yield every different box with the lowest rank that holds it."""
        last: Box | None = None
        for rank, box in self.pieces:
            if box != last:
                yield rank, box
            last = box

    def validate(self) -> None:
        """Raise PlacementError unless the boxes cover every element exactly once."""
        boxes = self.boxes()
        whole = Box.whole(self.shape)
        for box in boxes:
            if len(box.sizes) != len(self.shape) or any(map(gt, box.ends, self.shape)):
                raise PlacementError(f"box {box} does not lie in a tensor of shape {self.shape}")
        held = sum(box.numel for box in boxes)
        many = len(boxes) > _FEW_BOXES
        if many and held == whole.numel and is_tiled(whole, boxes):
            return
        overlap = first_overlap(boxes[:_SOME_BOXES])
        if overlap is not None:
            raise PlacementError(
                f"boxes {overlap[0]} and {overlap[1]} of a tensor of shape {self.shape} overlap "
                "without being equal"
            )
        if held != whole.numel:
            raise PlacementError(
                f"the ranks hold {held} of the {whole.numel} elements of a tensor of shape "
                f"{self.shape}: {', '.join(map(str, boxes[:8]))}"
            )
        if many:
            raise PlacementError(
                f"some of the {len(boxes)} boxes of a tensor of shape {self.shape} overlap without "
                "being equal, and some elements are in none"
            )

    def pieces_meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield (lowest rank, held box, common box) of every held box that meets ``box``."""
        for rank, held in self.distinct_pieces():
            common = held.intersect(box)
            if common is not None:
                yield rank, held, common

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of shape and boxes."""
        return {
            "shape": list(self.shape),
            "boxes": [[rank, str(box)] for rank, box in self.pieces],
        }

    @classmethod
    def from_json(cls, value: object) -> IrregularLayout:
        """Return the layout that ``to_json`` wrote; PlacementError where it is malformed."""
        try:
            fields = cast(dict[str, Any], value)
            return cls(
                ints(fields["shape"], "shape"),
                tuple((integer(rank, "rank"), Box.parse(text)) for rank, text in fields["boxes"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PlacementError):
                raise
            raise PlacementError(
                f"not an irregular layout: {repr(value)[:300]} ({error})"
            ) from error
