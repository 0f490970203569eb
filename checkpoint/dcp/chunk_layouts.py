"""The layout of a tensor of which ranks write chunks: mesh and placements where there are any.

A planner of torch.distributed.checkpoint tells boxes. Those of FSDP and tensor parallelism are the
cells of a grid, each on a rank of its own: a mesh with its axes says the same in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Placement, Ragged, Replicate, Shard


def layout_of_chunks(shape: tuple[int, ...], chunks: Mapping[Box, int]) -> Layout | IrregularLayout:
    """Return the layout by which ranks hold boxes; PlacementError unless they cover ``shape`` once.

    A tensor without elements has one chunk, which is empty.

    >>> halves = {Box((0, 0), (2, 3)): 0, Box((2, 0), (2, 3)): 4}
    >>> print(layout_of_chunks((4, 3), halves))
    [4, 3] (S(0)) on axis0=2
    """
    whole = Box.whole(shape)
    if list(chunks) == [whole]:
        return Layout(Mesh((1,), (), (chunks[whole],)), (Replicate(),), shape)
    layout = IrregularLayout(shape, tuple((rank, box) for box, rank in chunks.items()))
    layout.validate()
    return _grid(shape, layout.pieces) or layout


class ChunkLayouts:
    """Layouts of many tensors, most of which are cut alike: equal ones are one object."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Layout | IrregularLayout] = {}

    def of(self, shape: tuple[int, ...], chunks: Mapping[Box, int]) -> Layout | IrregularLayout:
        """Return what ``layout_of_chunks`` does."""
        key = (shape, *chunks.items())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = layout_of_chunks(shape, chunks)
        return known


def _grid(shape: tuple[int, ...], pieces: Sequence[tuple[int, Box]]) -> Layout | None:
    """Return the layout of boxes that tile a tensor, if they are the cells of a grid."""
    ranks = {box.offsets: rank for rank, box in pieces}
    starts = [sorted({box.offsets[dim] for _, box in pieces}) for dim in range(len(shape))]
    cuts = [dim for dim, found in enumerate(starts) if len(found) > 1]
    counts = tuple(len(starts[dim]) for dim in cuts)
    num_cells = 1
    for count in counts:
        num_cells *= count
    # As many boxes as cells, no two of which begin at one place, leave each one a cell.
    if not num_cells == len(pieces) == len(ranks) == len(set(ranks.values())):
        return None
    placements = tuple(_cut(dim, shape[dim], starts[dim]) for dim in cuts)
    return Layout(Mesh(counts, (), tuple(ranks[at] for at in sorted(ranks))), placements, shape)


def _cut(dim: int, size: int, starts: Sequence[int]) -> Placement:
    step = -(-size // len(starts))
    if list(starts) == list(range(0, size, step)):
        return Shard(dim)
    ends = [*starts[1:], size]
    return Ragged(dim, tuple(end - start for start, end in zip(starts, ends, strict=True)))
