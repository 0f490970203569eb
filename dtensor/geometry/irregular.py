"""Irregular layouts: an explicit list of the boxes that ranks hold.

For tensors whose placement no mesh arithmetic describes (packed expert weights, foreign tensor
types that only tell their chunks). The cost grows with the number of boxes, so a ``Layout`` is
used wherever one exists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
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
    >>> [(ranks, str(common)) for ranks, _, common in layout.pieces_meeting(Box((2,), (2,)))]
    [((0,), '[2:3]'), ((1,), '[3:4]')]
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, Box], ...]
    """(rank, box) pairs; empty boxes are left out and the rest is sorted."""
    _index: _Index | None = field(default=None, init=False, repr=False, compare=False)
    """Made when something is first looked for."""

    def __post_init__(self) -> None:
        if any(not 0 <= size < 1 << 63 for size in self.shape):
            raise PlacementError(f"a tensor cannot have the shape {self.shape}")
        pieces = sorted(
            {(rank, box) for rank, box in self.pieces if not box.is_empty},
            key=_order,
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

    def all_ranks(self) -> Sequence[int]:
        """Return the ranks that hold something."""
        return tuple(self._indexed().by_rank)

    def held_by(self, rank: int, replicas: Container[int] | None = None) -> tuple[Box, ...]:
        """Return the boxes that a rank holds, in row-major order of their offsets.

        Only those of which it has one of some ``replicas``, where they are given.
        """
        boxes = self._indexed().by_rank.get(rank, ())
        if replicas is None:
            return boxes
        return tuple(box for box in boxes if self.replica_of(rank, box) in replicas)

    def pieces_meeting(self, box: Box) -> Iterator[tuple[Sequence[int], Box, Box]]:
        """Yield (its ranks, held box, common box) of every different box that meets ``box``.

        The ranks are in ascending order.
        """
        index = self._indexed()
        for held in index.near(box):
            common = held.intersect(box)
            if common is not None:
                yield index.by_box[held], held, common

    def replica_ranks(self, held: Box) -> Sequence[int]:
        """Return the ranks that hold a box, in ascending order; none if nobody does."""
        return self._indexed().by_box.get(held, ())

    def replica_of(self, rank: int, held: Box) -> int:
        """Return which replica of a box a rank has that holds it."""
        return bisect_left(self.replica_ranks(held), rank)

    def giver_number(self, box: Box, taker: int, wanted: Box, num_givers: int) -> int:
        """Return which of so many holders of a box gives of it to a rank of this layout.

        They take turns, piece by piece.
        """
        return bisect_left(self.pieces, _order((taker, wanted)), key=_order) % num_givers

    def _indexed(self) -> _Index:
        index = self._index
        if index is None:
            index = _Index(self)
            object.__setattr__(self, "_index", index)
        return index

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


def _order(piece: tuple[int, Box]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return piece[1].offsets, piece[1].sizes, piece[0]


class _Index:
    """Pieces by rank, by box and by place."""

    def __init__(self, layout: IrregularLayout) -> None:
        by_rank: dict[int, list[Box]] = {}
        by_box: dict[Box, list[int]] = {}
        for rank, box in layout.pieces:
            by_rank.setdefault(rank, []).append(box)
            by_box.setdefault(box, []).append(rank)
        self.by_rank = {rank: tuple(boxes) for rank, boxes in by_rank.items()}
        self.by_box = {box: tuple(ranks) for box, ranks in by_box.items()}
        # Along the dim in which boxes start at most places, few of them start near one another.
        self._ndim = len(layout.shape)
        starts = [len({box.offsets[dim] for box in by_box}) for dim in range(self._ndim)]
        self._dim = dim = max(range(self._ndim), key=starts.__getitem__, default=None)
        self._boxes = list(by_box)
        if dim is not None:
            self._boxes.sort(key=lambda box: box.offsets[dim])
            self._starts = [box.offsets[dim] for box in self._boxes]
            self._longest = max((box.sizes[dim] for box in self._boxes), default=0)

    def near(self, box: Box) -> Sequence[Box]:
        """Return different boxes with all that meet ``box``."""
        if box.ndim != self._ndim:
            raise PlacementError(f"box {box} does not lie in a tensor of {self._ndim} dims")
        if self._dim is None:
            return self._boxes
        start, end = box.offsets[self._dim], box.ends[self._dim]
        low = bisect_right(self._starts, start - self._longest)
        return self._boxes[low : bisect_left(self._starts, end)]
