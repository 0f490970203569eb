"""Windows: dims that have some steps of a factor only, as a slice has of the dim it is taken from.

The steps of a window are a ``range``. Where an axis cuts the factor, every dim is cut at the same
steps, so that a rank's part of a slice lies in its part of the tensor and nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def even_bounds(extent: int, count: int) -> list[int]:
    """Return where even chunks of a dim begin, and the end.

    >>> even_bounds(5, 4)
    [0, 2, 4, 5, 5]
    """
    chunk = -(-extent // count)
    return [min(index * chunk, extent) for index in range(count)] + [extent]


def bounds_of_pieces(sizes: Sequence[int], window: range, extent: int) -> list[int]:
    """Return steps at which a factor is cut where pieces of a window have these sizes.

    Between two elements of the window any step would do: the one nearest to even chunks is taken,
    so that the gradient of a slice is cut as the tensor was.

    >>> bounds_of_pieces((0, 1, 1, 0), range(3, 5), 8)
    [0, 2, 4, 6, 8]
    """
    ends = list(accumulate(sizes))
    even = even_bounds(extent, len(sizes))
    bounds = [0]
    for end, wanted in zip(ends[:-1], even[1:-1], strict=True):
        lowest = window[end - 1] + 1 if end else 0
        highest = window[end] if end < len(window) else extent
        bounds.append(min(max(wanted, lowest), highest))
    return [*bounds, extent]


def sizes_between(bounds: Sequence[int], window: range) -> tuple[int, ...]:
    """Return how many elements of a window lie between the bounds.

    >>> sizes_between([0, 2, 4, 6, 8], range(1, 8, 2))
    (1, 1, 1, 1)
    """
    positions = [num_below(bound, window) for bound in bounds]
    return tuple(end - start for start, end in pairwise(positions))


def num_below(bound: int, window: range) -> int:
    """Return how many elements of a window lie below a step."""
    return min(max(-(-(bound - window.start) // window.step), 0), len(window))
