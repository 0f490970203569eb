"""Boxes of stored tensors as sources of bytes, read for what is written one after the other.

Neighbouring small ones are read in one go, large ones in parts, so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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

    One read is ahead of what is used. Whoever has used up all sources asks ``data`` once whether
    files are unchanged, before what was made of them counts: for every batch it would be a request
    more.
    """

    def __init__(
        self, data: StoredData, on_read: Callable[[int], None], *, num_local: int | None = None
    ) -> None:
        """``on_read`` is called with the number of bytes of each read, as it is used.

        ``num_local`` processes of a host read at the same time, if that is known.
        """
        self._data = data
        self._on_read = on_read
        self._num_local = num_local

    def sources(self, parts: Sequence[Part]) -> list[Source]:
        """Return a source for each part, to be used once each and in this order."""
        batches: list[list[Part]] = []
        sources: list[Source] = []
        arrays = self._read_ahead(batches)
        room = 0
        for part in parts:
            num_bytes = self._num_bytes(part)
            if num_bytes > PIECE_BYTES:
                pieces = self._pieces(part)
                batches += ([piece] for piece in pieces)
                room = 0
            else:
                if num_bytes > room or not batches:
                    batches.append([])
                    room = PIECE_BYTES
                pieces = [part]
                batches[-1].append(part)
                room -= num_bytes
            sources.append(_SourceOf(arrays, len(pieces)))
        return sources

    def _num_bytes(self, part: Part) -> int:
        name, box = part
        return box.numel * self._data.manifest.tensors[name].dtype.itemsize

    def _pieces(self, part: Part) -> list[Part]:
        """Return what a large part is read as."""
        name, box = part
        itemsize = self._data.manifest.tensors[name].dtype.itemsize
        return [(name, piece) for piece in box.parts(PIECE_BYTES // itemsize)]

    def _read_ahead(self, batches: Sequence[Sequence[Part]]) -> Iterator[Array]:
        """Yield the items of all parts; the next batch is read meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="dtckpt-ahead") as pool:
            following = pool.submit(self._read, batches[0])
            for number in range(1, len(batches) + 1):
                arrays = following.result()
                if number < len(batches):
                    following = pool.submit(self._read, batches[number])
                else:
                    pool.shutdown()  # now: the generator may be let go of before its end, and an
                    # interrupt that came while that waits would be lost
                self._on_read(sum(array.nbytes for array in arrays))
                while arrays:
                    yield arrays.pop(0)

    def _read(self, parts: Sequence[Part]) -> list[Array]:
        """Return the items of some parts, as ``DType.items``."""
        tensors = self._data.manifest.tensors
        arrays = [np.empty(b.sizes, dtype=tensors[name].dtype.items) for name, b in parts]
        wants = [
            Want(tensor=tensors[name], box=box, sink=ArraySink(array))
            for (name, box), array in zip(parts, arrays, strict=True)
        ]
        reads = plan_reads(self._data, wants)
        execute(reads, check_files=False, num_local=self._num_local)
        return arrays


@dataclass(frozen=True, slots=True)
class _SourceOf:
    """The next few of some arrays."""

    arrays: Iterator[Array]
    count: int

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for _ in range(self.count):
            data = next(self.arrays).reshape(-1).view(np.uint8).data
            for start in range(0, max(len(data), 1), max_bytes):
                yield data[start : start + max_bytes]
