"""Data files read from end to end, every block compared with its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...storage.base import ReadRequest
from ..files.datafile import Entry
from ..files.stored_data import Damage, DataFile, SummedRecord
from . import limits


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Some bytes of a file, as they lie there."""

    data: memoryview
    num_chunk_bytes: int
    """How many of them are of chunks that were asked for."""
    damaged: tuple[Damage, ...]
    """Blocks of these chunks that do not have their digests."""


def stretches(file: DataFile, entries: Iterable[Entry]) -> Iterator[Stretch]:
    """Read all blocks of some chunks, given in file order, some MiB at a time.

    All chunks of a file give all of its data region, in order and without gaps.
    """
    for spans in batches(file, entries):
        yield read_batch(file, spans)
    file.check_unchanged()


def batches(file: DataFile, entries: Iterable[Entry]) -> Iterator[Batch]:
    """Yield what is read in one go of some chunks, given in file order."""
    return _batches(entries, file.layout.block_bytes, limits.piece_bytes(file.store))


def read_batch(file: DataFile, spans: Batch) -> Stretch:
    """Return the bytes of a batch as they lie in the file."""
    start, end = spans[0].start, spans[-1].end
    data = memoryview(bytearray(end - start))
    stored = file.read_as_stored(file.layout.data_start + start, data)
    damaged: list[Damage] = []
    for span in spans:
        blocks = data[span.start - start : span.end - start]
        damaged += file.damaged(span.entry, span.start - span.entry.start, blocks)
    return Stretch(stored, sum(span.end - span.start for span in spans), tuple(damaged))


class Checker:
    """Finds damage in one batch after the other, with one buffer; each thread has its own."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def damaged(self, file: DataFile, spans: Batch) -> list[Damage]:
        """Return the blocks of a batch that do not have their digests.

        Each is hashed as soon as it is read, while it is in the processor's cache.
        """
        start, num_bytes = spans[0].start, spans[-1].end - spans[0].start
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        data = memoryview(self._buffer)
        block_bytes = file.layout.block_bytes
        step = max(limits.VERIFY_BYTES // block_bytes, 1) * block_bytes
        checks: dict[ReadRequest, tuple[Entry, int]] = {}
        for entry, low, high in spans:
            for at in range(low, high, step):
                view = data[at - start : min(at + step, high) - start]
                request = ReadRequest(file.layout.data_start + at, view)
                checks[request] = entry, at - entry.start
        found: list[Damage] = []
        for request in file.read_each(list(checks)):
            entry_and_low = checks.pop(request, None)
            if entry_and_low is not None:
                found += file.damaged(*entry_and_low, request.view)
        for request, (entry, low) in checks.items():  # whatever a store tells, all is verified
            found += file.damaged(entry, low, request.view)
        return found


def damage_of(file: DataFile, record: SummedRecord) -> list[Damage]:
    """Read a record of an archive, and return one damage per chunk if it has not its CRC-32."""
    step, crc = limits.piece_bytes(file.store), 0
    buffer = memoryview(bytearray(min(step, record.num_bytes)))
    end = record.start + record.num_bytes
    for start in range(record.start, end, step):
        piece = buffer[: min(step, end - start)]
        file.store.read_into(file.name, [ReadRequest(start, piece)])
        crc = zlib.crc32(piece, crc)
    if crc == record.crc:
        return []
    return [Damage(file=file, start=record.start, end=end, key=key) for key in record.keys]


class Span(NamedTuple):
    """Whole blocks of a chunk; bytes count from the start of the data region."""

    entry: Entry
    start: int
    end: int


Batch = list[Span]
"""What is read in one go: whole blocks that follow one another."""


def _batches(entries: Iterable[Entry], block_bytes: int, most: int) -> Iterator[Batch]:
    """Yield chunks in spans that are read together, at most about ``most`` bytes."""
    step = max(most // block_bytes, 1) * block_bytes
    batch: Batch = []
    for entry in entries:
        for start in range(entry.start, entry.end, step):
            end = min(start + step, entry.end)
            if batch and end - batch[0].start > most:
                yield batch
                batch = []
            batch.append(Span(entry, start, end))
    if batch:
        yield batch
