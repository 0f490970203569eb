"""Where the blocks of a compressed file lie, and how they are read and decoded.

To those who plan reads a compressed file looks as if it was not: they count bytes of its header and
of the blocks as they are when decoded. Only here these are turned into the bytes that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...storage.base import ReadRequest, Store
from .codec import borrowed_codec

_LENGTH = np.dtype("<u4")

Spoil = Callable[[int, memoryview], None]
"""Makes the memory of a block that could not be decoded differ from what was written."""


class StoredBlocks:
    """The blocks of a compressed file, in order.

    >>> blocks = StoredBlocks(4096, [(100, 2), (40, 1)], 64, bytes([50, 0, 0, 0, 36, 0, 0, 0, 7]))
    Traceback (most recent call last):
    ValueError: 3 blocks, and 9 bytes of lengths
    >>> table = b"".join(n.to_bytes(4, "little") for n in (50, 36, 7))
    >>> blocks = StoredBlocks(4096, [(100, 2), (40, 1)], 64, table)
    >>> blocks.span(4096 + 64, 4096 + 140)
    (1, 3)
    >>> blocks.place(2), blocks.stored_bytes
    ((4182, 4189), 93)
    """

    def __init__(
        self, data_start: int, chunks: Iterable[tuple[int, int]], block_bytes: int, lengths: bytes
    ) -> None:
        """``chunks`` are the bytes and the width of the elements of each, in file order.

        ``lengths`` are the stored lengths as the file has them. ValueError where they are not such
        of these chunks.
        """
        parts: list[Any] = []
        widths: list[Any] = []
        for num_bytes, width in chunks:
            count = -(-num_bytes // block_bytes)
            sizes = np.full(count, block_bytes, dtype=np.int64)
            if count:
                sizes[-1] = num_bytes - (count - 1) * block_bytes
            parts.append(sizes)
            widths.append(np.full(count, width, dtype=np.uint8))
        sizes = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        if len(lengths) != _LENGTH.itemsize * len(sizes):
            raise ValueError(f"{len(sizes)} blocks, and {len(lengths)} bytes of lengths")
        stored = np.frombuffer(lengths, dtype=_LENGTH).astype(np.int64)
        odd = np.flatnonzero((stored < 1) | (stored > sizes))
        if len(odd):
            raise ValueError(
                f"block {odd[0]} of {sizes[odd[0]]} bytes is stored in {stored[odd[0]]}"
            )
        self._starts = data_start + np.concatenate([[0], np.cumsum(sizes)])
        self._places = data_start + np.concatenate([[0], np.cumsum(stored)])
        self._widths = np.concatenate(widths) if widths else np.empty(0, dtype=np.uint8)

    @property
    def stored_bytes(self) -> int:
        """Length of all blocks as they are stored."""
        return int(self._places[-1] - self._places[0])

    def place(self, block: int, end: int | None = None) -> tuple[int, int]:
        """Return where a block lies in the file, or all from it to before the block ``end``."""
        end = block + 1 if end is None else end
        return int(self._places[block]), int(self._places[end])

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the first block of a range of decoded bytes, and the one after the last.

        ValueError unless the range is of whole blocks.
        """
        bounds = np.searchsorted(self._starts, (start, end))
        if bounds[1] > len(self._widths) or tuple(self._starts[bounds]) != (start, end):
            raise ValueError(f"bytes {start} to {end} are not whole blocks of a compressed file")
        return int(bounds[0]), int(bounds[1])

    def decode(
        self, span: tuple[int, int], stored: memoryview, data: memoryview, spoil: Spoil
    ) -> None:
        """Fill memory with a span of blocks from how they are stored.

        ``spoil`` is called with the number and the memory of every block that cannot be decoded.
        """
        first, last = span
        low, place = int(self._starts[first]), int(self._places[first])
        with borrowed_codec() as codec:
            for block in range(first, last):
                start, end = int(self._starts[block]) - low, int(self._starts[block + 1]) - low
                part = stored[
                    int(self._places[block]) - place : int(self._places[block + 1]) - place
                ]
                try:
                    codec.decode(part, data[start:end], int(self._widths[block]))
                except ValueError:
                    spoil(block, data[start:end])

    def read_each(
        self, store: Store, name: str, requests: Sequence[ReadRequest], spoil: Spoil
    ) -> Iterator[ReadRequest]:
        """Do what ``Store.read_each`` does, where offsets count decoded bytes.

        Every request is of whole blocks; ValueError if not.
        """
        spans: dict[ReadRequest, tuple[tuple[int, int], ReadRequest]] = {}
        with borrowed_codec() as codec:
            wanted = [(request, self.span(request.offset, request.stop)) for request in requests]
            rooms = [self.place(*span) for _, span in wanted]
            memory = codec.memory(sum(end - start for start, end in rooms)).data
            for (request, span), (start, end) in zip(wanted, rooms, strict=True):
                room, memory = memory[: end - start], memory[end - start :]
                is_raw = end - start == request.view.nbytes
                read = ReadRequest(start, request.view if is_raw else room)
                spans[read] = span, request
            for read in store.read_each(name, list(spans)):
                if read in spans:
                    yield self._decoded(read, *spans.pop(read), spoil)
            for read, told in spans.items():  # whatever a store tells, all has been read
                yield self._decoded(read, *told, spoil)

    def _decoded(
        self, read: ReadRequest, span: tuple[int, int], request: ReadRequest, spoil: Spoil
    ) -> ReadRequest:
        if read.view.nbytes != request.view.nbytes:
            self.decode(span, read.view, request.view, spoil)
        return request
