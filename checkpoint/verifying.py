"""Verification of a whole checkpoint: every byte of every file, all faults listed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch

from ..dtensor.box import Box
from ..storage.base import ReadRequest, Store
from ..storage.open import open_store
from .cuts import READ_BYTES
from .datafile import Entry
from .manifest import FileRecord, Manifest, read_manifest
from .stored import Damage, DataFile, StoredData


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault of a checkpoint."""

    message: str
    """What is wrong, naming file, byte range and tensors."""
    file: str | None = None
    """Name of the data file in the checkpoint, where the fault is in one."""
    start: int = 0
    """First byte that cannot be used."""
    end: int = 0
    tensors: tuple[str, ...] = ()
    """Tensors with bytes in that range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    url: str
    num_files: int
    num_tensors: int
    bytes_checked: int
    """Bytes that were read and compared with a checksum."""
    problems: tuple[Problem, ...]
    """Every fault; empty if the checkpoint is intact."""


def verify(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read a checkpoint completely and report every fault.

    ``on_progress(done, total)`` is called with bytes. Faults of data files, storage errors
    included, are collected; raises NotCommitted or Corrupt only where the manifest itself cannot
    be used.
    """
    store = open_store(checkpoint_id, **dict(storage_options or {}))
    manifest = read_manifest(store)
    return _Verification(store, manifest, on_progress).run()


class _Verification:
    def __init__(
        self, store: Store, manifest: Manifest, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.store = store
        self.manifest = manifest
        self.data = StoredData(store, manifest)
        self.on_progress = on_progress
        self.total = sum(record.size for record in manifest.files)
        self.checked = 0
        self.problems: list[Problem] = []
        self.lost: set[str] = set()
        """Tensors that lie in a file of an earlier checkpoint which is of no use."""

    def run(self) -> VerifyReport:
        unusable: set[int] = set()
        for record in self.manifest.files:
            try:
                file = self.data.file(record.rank, "all")
                self.progress(record.size - file.layout.data_bytes)
                self.check_blocks(file, file.layout.entries.values())
                self.check_borrowed(file)
            except CheckpointError as error:
                unusable.add(record.rank)
                self.problems.append(self.unusable_file(record, error))
        self.check_chunks(unusable)
        return VerifyReport(
            url=self.store.url,
            num_files=len(self.manifest.files),
            num_tensors=len(self.manifest.tensors),
            bytes_checked=self.checked,
            problems=tuple(self.problems),
        )

    def unusable_file(self, record: FileRecord, error: CheckpointError) -> Problem:
        """Return the problem of a file that as a whole cannot be read or understood."""
        tensors = [t for t in self.manifest.tensors.values() if any(t.chunks_of(record.rank))]
        names = ", ".join(t.name for t in tensors[:8])
        others = f" and {len(tensors) - 8} more" if len(tensors) > 8 else ""
        return Problem(
            message=f"{error}. Of no use now: bytes 0 to {record.size} with {names}{others}",
            file=self.manifest.path_of(record),
            start=0,
            end=record.size,
            tensors=tuple(t.name for t in tensors),
        )

    def check_borrowed(self, file: DataFile) -> None:
        """Verify what a file refers to in earlier checkpoints."""
        by_id: dict[str, list[str]] = {}
        for key, file_id in file.layout.references.items():
            by_id.setdefault(file_id, []).append(key)
        for file_id, keys in by_id.items():
            try:
                lender = self.data.borrowed(file_id, keys[0])
            except CheckpointError as error:
                names = tuple(dict.fromkeys(key.partition("[")[0] for key in keys))
                self.problems.append(Problem(message=str(error), tensors=names))
                self.lost.update(names)
                continue
            # What the file has not is found missing with the other chunks.
            found = [e for key in keys if (e := lender.layout.entries.get(key)) is not None]
            self.total += sum(entry.num_bytes for entry in found)
            self.check_blocks(lender, sorted(found, key=lambda entry: entry.start))

    def check_blocks(self, file: DataFile, entries: Iterable[Entry]) -> None:
        """Verify all blocks of some chunks, given in file order."""
        for spans in _batches(entries, file.layout.block_bytes):
            start, end = spans[0].start, spans[-1].end
            data = memoryview(bytearray(end - start))
            file.store.read_into(file.name, [ReadRequest(file.layout.data_start + start, data)])
            for span in spans:
                blocks = data[span.start - start : span.end - start]
                damaged = file.damaged(span.entry, span.start - span.entry.start, blocks)
                self.problems += map(_damaged, damaged)
            self.progress(sum(span.end - span.start for span in spans))

    def check_chunks(self, unusable: set[int]) -> None:
        """Check that the files hold every chunk of every tensor."""
        for tensor in self.manifest.tensors.values():
            if tensor.stored_name in self.lost:
                continue
            try:
                for rank, chunk, _ in tensor.chunks_meeting(Box.whole(tensor.shape)):
                    if rank not in unusable:
                        self.data.entry(rank, tensor, chunk)
            except (Corrupt, LayoutMismatch) as error:
                self.problems.append(Problem(message=str(error), tensors=(tensor.name,)))

    def progress(self, num_bytes: int) -> None:
        self.checked += num_bytes
        if self.on_progress is not None:
            self.on_progress(self.checked, self.total)


class _Span(NamedTuple):
    """Whole blocks of a chunk; bytes count from the start of the data region."""

    entry: Entry
    start: int
    end: int


def _batches(entries: Iterable[Entry], block_bytes: int) -> Iterator[list[_Span]]:
    """Yield chunks in spans that are read together."""
    step = max(READ_BYTES // block_bytes, 1) * block_bytes
    batch: list[_Span] = []
    for entry in entries:
        for start in range(entry.start, entry.end, step):
            end = min(start + step, entry.end)
            if batch and end - batch[0].start > READ_BYTES:
                yield batch
                batch = []
            batch.append(_Span(entry, start, end))
    if batch:
        yield batch


def _damaged(damage: Damage) -> Problem:
    return Problem(
        message=str(damage),
        file=damage.file.name,
        start=damage.start,
        end=damage.end,
        tensors=(damage.key.partition("[")[0],),
    )
