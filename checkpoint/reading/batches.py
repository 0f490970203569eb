"""Boxes of stored tensors as sources of bytes, read for what is written one after the other.

Neighbouring small ones are read in one go, large ones in parts, so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dtensor.geometry.box import Box
from ..files.stored_data import StoredData
from ..tensors.sink import Array
from ..tensors.source import PIECE_BYTES, Source
from .execution import execute
from .read_plan import plan_reads
from .wants import ArraySink, Want


def counted(on_progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Return what adds up bytes and calls ``on_progress(done, total)`` with their sum."""
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    return add


Part = tuple[str, Box]
"""The name of a tensor, and the elements that are wanted of it."""


class BatchedReader:
    """Reads parts of a checkpoint in the order in which their sources are asked for pieces.

    Whoever has used up all sources asks ``data`` once whether files are unchanged, before what was
    made of them counts: for every batch it would be a request more.
    """

    def __init__(self, data: StoredData, on_read: Callable[[int], None]) -> None:
        """``on_read`` is called with the number of bytes after each read."""
        self._data = data
        self._on_read = on_read

    def sources(self, parts: Sequence[Part]) -> list[Source]:
        """Return a source for each part, to be used once each and in this order."""
        batch, sources = _Batch(self), list[Source]()
        for part in parts:
            num_bytes = self.num_bytes(part)
            if not batch.has_room(num_bytes):
                batch = _Batch(self)
            batch.add(part, num_bytes)
            sources.append(_BatchSource(batch, part))
        return sources

    def num_bytes(self, part: Part) -> int:
        """Return how many bytes a part has."""
        name, box = part
        return box.numel * self._data.manifest.tensors[name].dtype.itemsize

    def read(self, parts: Sequence[Part]) -> list[Array]:
        """Return the items of some parts, as unsigned ints as wide as an element."""
        tensors = self._data.manifest.tensors
        arrays = [np.empty(b.sizes, dtype=f"u{tensors[name].dtype.itemsize}") for name, b in parts]
        wants = [
            Want(tensor=tensors[name], box=box, sink=ArraySink(array))
            for (name, box), array in zip(parts, arrays, strict=True)
        ]
        execute(plan_reads(self._data, wants), check_files=False)
        self._on_read(sum(array.nbytes for array in arrays))
        return arrays

    def in_parts(self, part: Part, max_bytes: int) -> Iterator[Array]:
        """Yield a large part piece by piece."""
        name, box = part
        itemsize = self._data.manifest.tensors[name].dtype.itemsize
        for piece in box.parts(max_bytes // itemsize):
            yield self.read([(name, piece)])[0]


@dataclass(slots=True)
class _Batch:
    """Parts that follow each other and are read in one go."""

    reader: BatchedReader
    parts: list[Part] = field(default_factory=list[Part])
    num_bytes: int = 0
    arrays: dict[Part, Array] | None = None

    def has_room(self, num_bytes: int) -> bool:
        return not self.parts or self.num_bytes + num_bytes <= PIECE_BYTES

    def add(self, part: Part, num_bytes: int) -> None:
        self.parts.append(part)
        self.num_bytes += num_bytes

    def pieces(self, part: Part, max_bytes: int) -> Iterator[Array]:
        if self.num_bytes > max_bytes:  # one part that is larger than a batch
            yield from self.reader.in_parts(part, max_bytes)
            return
        if self.arrays is None:
            self.arrays = dict(zip(self.parts, self.reader.read(self.parts), strict=True))
        yield self.arrays.pop(part)


@dataclass(frozen=True, slots=True)
class _BatchSource:
    batch: _Batch
    part: Part

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for array in self.batch.pieces(self.part, max_bytes):
            yield array.reshape(-1).view(np.uint8).data
