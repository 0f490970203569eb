"""Stripes: stored tensors dealt out among the ranks that load them, in runs of whole blocks.

Pure geometry. Every rank derives the same answer from layouts alone: who reads which stripe, and
in which round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...dtensor.geometry.box import Box, run_boxes
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import unravel
from ..files.stored_tensor import StoredTensor
from ..reading import limits
from ..reading.cuts import Geometry

_STRIPES_PER_RANK = 8
"""As many at least, so that all have about as much to read."""
_SAMPLED_BOXES = 2
_SAMPLED_CHUNKS = 4
_SAMPLED_CUTS = 16


@dataclass(frozen=True, slots=True)
class StripedTensor:
    """A stored tensor and the layout in which ranks want it."""

    stored: StoredTensor
    layout: Layout | IrregularLayout
    """Of the whole tensor if it is regular; an irregular one may leave out most of it."""

    @property
    def wanted(self) -> IrregularLayout | None:
        """What ranks want of it; None if they want all."""
        return self.layout if isinstance(self.layout, IrregularLayout) else None

    @property
    def num_bytes(self) -> int:
        """How many bytes ranks want of it."""
        if self.wanted is None:
            return self.stored.num_bytes
        return sum(box.numel for box in self.wanted.boxes()) * self.stored.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """Neighbouring elements of one stored chunk, which one rank reads for all."""

    tensor: StripedTensor
    writer: int
    """The rank in whose data file the chunk is."""
    chunk: Box
    start: int
    """Bytes of the chunk before them."""
    boxes: tuple[Box, ...]
    """The elements, as boxes that follow each other in the chunk."""
    num_bytes: int
    reader: int
    """Position of the rank that reads them."""


def deal(tensors: Sequence[StripedTensor], num_ranks: int, round_bytes: int) -> list[list[Stripe]]:
    """Return the stripes of every round, each with its reader, of what some rank wants.

    Neighbours fall to the same reader, whose share is a row of them, so that only few blocks lie
    across a border. In a round a rank reads at most ``round_bytes``.
    """
    total = sum(tensor.num_bytes for tensor in tensors)
    most = min(limits.STRIPE_BYTES, round_bytes)
    stripe_bytes = min(total // (num_ranks * _STRIPES_PER_RANK), most)
    runs = list(_runs_of_all(tensors, max(stripe_bytes // limits.BLOCK_BYTES, 1)))
    total = sum(run.num_bytes for _, run in runs)
    rounds: list[list[Stripe]] = []
    loads = [0] * num_ranks  # bytes of each rank in its last round
    lasts = [0] * num_ranks
    before = 0
    for tensor, run in runs:
        num_bytes = run.num_bytes
        reader = (2 * before + num_bytes) * num_ranks // (2 * total)
        before += num_bytes
        room = -(-num_bytes // limits.ALIGNMENT) * limits.ALIGNMENT
        if loads[reader] + room > round_bytes:
            lasts[reader] += 1
            loads[reader] = 0
        loads[reader] += room
        while lasts[reader] >= len(rounds):
            rounds.append([])
        stripe = Stripe(tensor=tensor, **run._asdict(), reader=reader)
        rounds[lasts[reader]].append(stripe)
    return rounds


class _Run(NamedTuple):
    """What a stripe has of itself."""

    writer: int
    chunk: Box
    start: int
    boxes: tuple[Box, ...]
    num_bytes: int


def _runs_of_all(
    tensors: Sequence[StripedTensor], blocks_of_stripe: int
) -> Iterator[tuple[StripedTensor, _Run]]:
    known: dict[tuple[object, ...], list[_Run]] = {}  # most tensors are laid out as others are
    for tensor in sorted(tensors, key=lambda s: -s.stored.dtype.itemsize):
        stored, wanted = tensor.stored, tensor.wanted
        key = (id(stored.layout), stored.writers, stored.cut, stored.dtype.itemsize, wanted)
        if key not in known:
            runs = _runs(stored, blocks_of_stripe * limits.BLOCK_BYTES)
            known[key] = [run for run in runs if wanted is None or _meets(wanted, run.boxes)]
        for run in known[key]:
            yield tensor, run


def _meets(wanted: IrregularLayout, boxes: Sequence[Box]) -> bool:
    return any(True for box in boxes for _ in wanted.pieces_meeting(box))


def _runs(stored: StoredTensor, stripe_bytes: int) -> Iterator[_Run]:
    """Yield the stripes of a tensor, chunk by chunk."""
    itemsize = stored.dtype.itemsize
    step = stripe_bytes // itemsize
    for writer, chunk in stored.chunks():
        numel = chunk.numel
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            boxes = tuple(run_boxes(chunk, start, stop))
            yield _Run(writer, chunk, start * itemsize, boxes, (stop - start) * itemsize)


def times_read(stored: StoredTensor, layout: Layout) -> float:
    """Return how many bytes ranks would read of a tensor, each for itself, for one byte of it.

    Without what replicas read once more. An estimate from a few boxes and chunks; 0 where the
    tensor has no elements.
    """
    wanted_bytes = read_bytes = 0
    for box in _some_boxes(layout):
        wanted, read = sampled_bytes(stored, box)
        wanted_bytes += wanted
        read_bytes += read
    return read_bytes / wanted_bytes if wanted_bytes else 0.0


def sampled_bytes(stored: StoredTensor, box: Box) -> tuple[int, int]:
    """Return some bytes of a box, and how many are read for them."""
    wanted_bytes = read_bytes = 0
    for _, chunk, _ in itertools.islice(stored.chunks_meeting(box), _SAMPLED_CHUNKS):
        geometry = Geometry(
            chunk=chunk,
            wanted=box,
            itemsize=stored.dtype.itemsize,
            block_bytes=limits.BLOCK_BYTES,
            staged_bytes=limits.READ_BYTES,
        )
        end = 0
        for cut in itertools.islice(geometry.cuts(runs=False), _SAMPLED_CUTS):
            wanted_bytes += cut.part.numel * geometry.itemsize
            read_bytes += max(cut.high - max(cut.low, end), 0)
            end = max(end, cut.high)
    return wanted_bytes, read_bytes


def _some_boxes(layout: Layout) -> Iterator[Box]:
    """Yield a few boxes that coordinates hold, all if there are few; none that is empty."""
    grid = layout.grid
    num_cells = math.prod(grid)
    count = min(num_cells, _SAMPLED_BOXES)
    for index in range(count):
        box = layout.cell_box(unravel(index * num_cells // count, grid))
        if not box.is_empty:
            yield box
