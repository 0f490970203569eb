"""Whether copies make up a whole: every element by exactly one of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dtckpt.errors import LayoutMismatch

from .copies import MOST_COPIES, Copy
from .meeting import meet

_MOST_COMPARED = 1 << 20


def check_tiling(copies: Sequence[Copy], numel: int, what: str) -> None:
    """Raise LayoutMismatch unless copies write each of ``numel`` elements once."""
    if len(copies) > MOST_COPIES:
        raise LayoutMismatch(f"{what}: {len(copies)} copies, at most {MOST_COPIES} are possible")
    for copy in copies:
        _check_bounds(copy, numel, what)
    held = sum(copy.numel for copy in copies)
    if held > numel:
        raise LayoutMismatch(f"{what}: expected {numel} elements, got {held}; some come twice")
    _check_disjoint(copies, what)
    if held < numel:
        raise LayoutMismatch(
            f"{what}: expected {numel} elements, got {held}; {numel - held} come from nowhere"
        )


def _check_bounds(copy: Copy, numel: int, what: str) -> None:
    reach = 0
    for size, to, _ in reversed(copy.loops):
        if size < 2 or to <= reach:
            raise LayoutMismatch(f"{what}: the loops of {copy} overlap, or do not fall")
        reach += (size - 1) * to
    if copy.start < 0 or copy.end > numel:
        raise LayoutMismatch(
            f"{what}: expected elements 0 to {numel}, got {copy.start} to {copy.end}"
        )


def _check_disjoint(copies: Sequence[Copy], what: str) -> None:
    """Raise LayoutMismatch where two share an element: a sweep by where they begin and end."""
    open_ones: list[tuple[int, int]] = []
    compared = 0
    ordered = sorted(copies, key=lambda copy: copy.start)
    for number, copy in enumerate(ordered):
        while open_ones and open_ones[0][0] <= copy.start:
            heapq.heappop(open_ones)
        compared += len(open_ones)
        if compared > _MOST_COMPARED:
            raise LayoutMismatch(f"{what}: the copies are too entangled to be checked")
        for _, other in open_ones:
            if meet(ordered[other], copy):
                raise LayoutMismatch(f"{what}: {ordered[other]} and {copy} bring the same elements")
        heapq.heappush(open_ones, (copy.end, number))
