"""Boxes: rectangles of a global index space.

A box is the only geometry that the library moves bytes by. Resharding is ``intersect`` followed by
``relative_to``: the part of a wanted box that a stored box holds, in the stored box's own
coordinates.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtckpt.errors import PlacementError

if TYPE_CHECKING:
    import numpy as np

_SPAN = re.compile(r"(\d{1,18}):(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offsets[d] <= i[d] < offsets[d] + sizes[d]`` of a tensor, for every dim d.

    A box with a size of 0 in some dim holds nothing. The box of a 0-d tensor has no dims and holds
    one element.

    >>> Box((2, 0), (3, 4)).numel
    12
    >>> print(Box((2, 0), (3, 4)))
    [2:5,0:4]
    """

    offsets: tuple[int, ...]
    """First index in every dim, in elements."""
    sizes: tuple[int, ...]
    """Extent in every dim, in elements."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise PlacementError(
                f"a box needs as many offsets as sizes, got {self.offsets} and {self.sizes}"
            )
        if self.sizes and (min(self.offsets) < 0 or min(self.sizes) < 0):
            raise PlacementError(
                "offsets and sizes of a box must not be negative, "
                f"got {self.offsets} and {self.sizes}"
            )

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of every element of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def parse(cls, text: str) -> Box:
        """Return the box that ``str`` wrote.

        >>> Box.parse("[2:5,0:4]") == Box((2, 0), (3, 4))
        True
        """
        inner = text[1:-1]
        spans = inner.split(",") if inner else []
        matches = [_SPAN.fullmatch(span) for span in spans]
        if text[:1] + text[-1:] != "[]" or not all(matches):
            raise PlacementError(f"not a box: {text!r}; expected a form like '[0:512,0:1024]'")
        bounds = [(int(match[1]), int(match[2])) for match in matches if match]
        return cls(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no element."""
        return 0 in self.sizes

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in every dim."""
        return tuple(a + n for a, n in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the box from an array of the global shape."""
        return tuple(slice(a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common elements, or None where there are none.

        >>> Box((0,), (4,)).intersect(Box((3,), (5,)))
        Box(offsets=(3,), sizes=(1,))
        >>> Box((0,), (4,)).intersect(Box((4,), (5,))) is None
        True
        """
        _require_same_ndim(self, other)
        offsets: list[int] = []
        sizes: list[int] = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = max(a, b)
            size = min(a + n, b + m) - start
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box; an empty box is in every box."""
        _require_same_ndim(self, other)
        return other.is_empty or self.intersect(other) == other

    def translate(self, by: tuple[int, ...]) -> Box:
        """Return the box moved by ``by`` elements in every dim.

        >>> Box((2, 0), (3, 4)).translate((-2, 1))
        Box(offsets=(0, 1), sizes=(3, 4))
        """
        return Box(tuple(a + d for a, d in zip(self.offsets, by, strict=True)), self.sizes)

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of ``outer``, which must contain it.

        An empty box is in every box, wherever it lies; its offsets become 0.

        >>> Box((5, 2), (1, 2)).relative_to(Box((4, 2), (4, 4)))
        Box(offsets=(1, 0), sizes=(1, 2))
        """
        if self.is_empty:
            return Box((0,) * self.ndim, self.sizes)
        return self.translate(tuple(-a for a in outer.offsets))

    def halves(self) -> tuple[Box, Box]:
        """Return the two halves along the first dim of more than one index.

        Elements of the first half come before those of the second in row-major order.

        >>> [str(half) for half in Box((0, 0), (1, 5)).halves()]
        ['[0:1,0:2]', '[0:1,2:5]']
        """
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if dim is None:
            raise PlacementError(f"a box of {self.numel} elements cannot be halved")
        offset, half = self.offsets[dim], self.sizes[dim] // 2
        return (
            Box(self.offsets, (*self.sizes[:dim], half, *self.sizes[dim + 1 :])),
            Box(
                (*self.offsets[:dim], offset + half, *self.offsets[dim + 1 :]),
                (*self.sizes[:dim], self.sizes[dim] - half, *self.sizes[dim + 1 :]),
            ),
        )

    def chunk(self, dim: int, count: int, index: int) -> Box:
        """Return one of ``count`` even pieces along a dim; the last ones may be smaller or empty.

        >>> [str(Box((2, 0), (5, 1)).chunk(0, 3, i)) for i in range(3)]
        ['[2:4,0:1]', '[4:6,0:1]', '[6:7,0:1]']
        """
        size = self.sizes[dim]
        step = -(-size // count)
        start = min(index * step, size)
        return Box(
            (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :]),
            (*self.sizes[:dim], min(step, size - start), *self.sizes[dim + 1 :]),
        )

    def parts(self, max_numel: int) -> Iterator[Box]:
        """Yield boxes of at most ``max_numel`` elements that make up this one, in row-major order.

        >>> [str(part) for part in Box((0, 0), (3, 4)).parts(4)]
        ['[0:1,0:4]', '[1:2,0:4]', '[2:3,0:4]']
        """
        if self.numel <= max(max_numel, 1):
            yield self
            return
        for half in self.halves():
            yield from half.parts(max_numel)

    def __str__(self) -> str:
        spans = zip(self.offsets, self.ends, strict=True)
        return "[" + ",".join(f"{start}:{end}" for start, end in spans) + "]"


def first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None where all are disjoint.

    A sweep along the dim in which the boxes start at most places: each is compared only with those
    that are still open there.

    >>> first_overlap([Box((0,), (4,)), Box((4,), (2,)), Box((3,), (2,))])
    (Box(offsets=(0,), sizes=(4,)), Box(offsets=(3,), sizes=(2,)))
    """
    held = [box for box in boxes if not box.is_empty]
    ndim = held[0].ndim if held else 0
    if ndim == 0:
        return (held[0], held[1]) if len(held) > 1 else None
    dim = max(range(ndim), key=lambda d: len({box.offsets[d] for box in held}))
    open_boxes: list[Box] = []
    for box in sorted(held, key=lambda b: (b.offsets[dim], b.offsets)):
        start = box.offsets[dim]
        open_boxes = [
            other for other in open_boxes if other.offsets[dim] + other.sizes[dim] > start
        ]
        for other in open_boxes:
            if box.intersect(other) is not None:
                return other, box
        open_boxes.append(box)
    return None


_MAX_CORNERS = 1 << 22


def is_tiled(whole: Box, boxes: list[Box]) -> bool:
    """Whether boxes that lie in ``whole`` cover every element of it exactly once.

    Every corner of every box is counted, with a sign that changes from one end of a dim to the
    other. How often elements are covered follows from these sums alone, so the boxes tile the whole
    if and only if all corners cancel but those of the whole. The cost grows with the number of
    corners, whatever the boxes look like; PlacementError where there are millions.

    >>> is_tiled(Box((0,), (4,)), [Box((0,), (3,)), Box((3,), (1,))])
    True
    >>> is_tiled(Box((0,), (4,)), [Box((0,), (2,)), Box((1,), (2,))])
    False
    """
    import numpy as np  # which takes longer than most of what this module is used for

    cut = [
        dim for dim, size in enumerate(whole.sizes) if any(box.sizes[dim] != size for box in boxes)
    ]
    if len(boxes) * max(len(cut), 1) << len(cut) > _MAX_CORNERS:
        raise PlacementError(
            f"{len(boxes)} boxes that cut {len(cut)} dims of a tensor of shape {whole.sizes} are "
            "too many to be checked; describe it by a mesh and placements"
        )
    ends = np.array(
        [[[bounds[dim] for dim in cut] for bounds in (b.offsets, b.ends)] for b in (whole, *boxes)],
        dtype=np.int64,
    )
    corners: list[np.ndarray[Any, Any]] = []
    signs: list[np.ndarray[Any, Any]] = []
    for chosen in itertools.product((0, 1), repeat=len(cut)):
        corners.append(ends[:, chosen, range(len(cut))])
        signs.append(np.full(len(ends), 1 - 2 * (sum(chosen) % 2)))
        signs[-1][0] *= -1  # the whole is to cancel what is left
    found, sign = np.concatenate(corners), np.concatenate(signs)
    if not cut:
        return int(sign.sum()) == 0
    order = np.lexsort(found.T)
    found, sign = found[order], sign[order]
    starts = np.flatnonzero(np.append(True, (found[1:] != found[:-1]).any(axis=1)))
    return not np.add.reduceat(sign, starts).any()


def run_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that hold the elements ``start`` to ``stop`` of a box, in row-major order.

    >>> [str(part) for part in run_boxes(Box((0, 0), (3, 4)), 2, 9)]
    ['[0:1,2:4]', '[1:2,0:4]', '[2:3,0:1]']
    """
    if start >= stop:
        return
    if stop - start == box.numel:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    row = box.numel // box.sizes[dim]
    index, at = divmod(start, row)
    if at:
        end = min(stop, (index + 1) * row)
        yield from run_boxes(_rows(box, dim, index, 1), at, end - index * row)
        start = end
    index, count = start // row, (stop - start) // row
    if count > 0:
        yield _rows(box, dim, index, count)
    rest = stop - start - count * row
    if rest > 0:
        yield from run_boxes(_rows(box, dim, index + count, 1), 0, rest)


def _rows(box: Box, dim: int, index: int, count: int) -> Box:
    offsets = (*box.offsets[:dim], box.offsets[dim] + index, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], count, *box.sizes[dim + 1 :]))


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many elements apart neighbours lie in every dim of a contiguous array.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(_suffix_products(shape))[::-1]


def _suffix_products(shape: tuple[int, ...]) -> Iterator[int]:
    product = 1
    for size in reversed(shape):
        yield product
        product *= size


def _require_same_ndim(a: Box, b: Box) -> None:
    if len(a.sizes) != len(b.sizes):
        raise PlacementError(f"boxes of {a.ndim} and {b.ndim} dims do not compare: {a} and {b}")
