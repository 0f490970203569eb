"""Data files read from end to end, every block compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..files.datafile import Entry
from ..files.stored_data import Damage, DataFile
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
    most = limits.piece_bytes(file.store)
    for spans in _batches(entries, file.layout.block_bytes, most):
        start, end = spans[0].start, spans[-1].end
        data = memoryview(bytearray(end - start))
        stored = file.read_as_stored(file.layout.data_start + start, data)
        damaged: list[Damage] = []
        for span in spans:
            blocks = data[span.start - start : span.end - start]
            damaged += file.damaged(span.entry, span.start - span.entry.start, blocks)
        yield Stretch(stored, sum(span.end - span.start for span in spans), tuple(damaged))
    file.check_unchanged()


class _Span(NamedTuple):
    """Whole blocks of a chunk; bytes count from the start of the data region."""

    entry: Entry
    start: int
    end: int


def _batches(entries: Iterable[Entry], block_bytes: int, most: int) -> Iterator[list[_Span]]:
    """Yield chunks in spans that are read together, at most about ``most`` bytes."""
    step = max(most // block_bytes, 1) * block_bytes
    batch: list[_Span] = []
    for entry in entries:
        for start in range(entry.start, entry.end, step):
            end = min(start + step, entry.end)
            if batch and end - batch[0].start > most:
                yield batch
                batch = []
            batch.append(_Span(entry, start, end))
    if batch:
        yield batch
