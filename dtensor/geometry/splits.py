"""Splits: how one mesh axis cuts one dim of a tensor."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """One cut of a tensor dim by one mesh axis."""

    axis: int
    num_pieces: int
    starts: tuple[int, ...] | None
    """First index of every ragged piece and the end of the last; None for even chunks."""

    def piece(self, index: int, extent: int) -> tuple[int, int]:
        """Return start and size of piece ``index`` of ``extent`` indices."""
        if self.starts is not None:
            return self.starts[index], self.starts[index + 1] - self.starts[index]
        chunk = -(-extent // self.num_pieces)
        start = min(index * chunk, extent)
        return start, min(chunk, extent - start)

    @property
    def largest(self) -> range:
        """Pieces one of which is the largest."""
        return range(1 if self.starts is None else self.num_pieces)

    def find(self, position: int, extent: int) -> int:
        """Return which piece holds ``position``."""
        if self.starts is not None:
            return bisect_right(self.starts, position) - 1
        return position // -(-extent // self.num_pieces)
