"""Verification of a whole checkpoint: every byte of every file, all faults listed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch

from ..dtensor.box import Box
from ..storage.base import ReadRequest, Store
from ..storage.open import open_store
from .blocks import num_blocks
from .manifest import FileRecord, Manifest, read_manifest
from .reading import MAX_READ_BYTES, Damage, Read, verify_blocks
from .stored import DataFile, StoredData


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

    def run(self) -> VerifyReport:
        unusable: set[int] = set()
        for record in self.manifest.files:
            try:
                file = self.data.file(record.rank, "all")
                self.progress(record.size - file.layout.data_bytes)
                self.check_blocks(file)
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

    def check_blocks(self, file: DataFile) -> None:
        """Verify the data region, block by block."""
        blocks = num_blocks(file.layout.data_bytes, file.layout.block_bytes)
        step = max(1, MAX_READ_BYTES // file.layout.block_bytes)
        for first in range(0, blocks, step):
            end = min(first + step, blocks)
            read = Read(file=file, first_block=first, end_block=end, pieces=())
            buffer = np.empty(read.num_bytes, dtype=np.uint8)
            offset = file.layout.data_start + read.start
            self.store.read_into(file.name, [ReadRequest(offset, buffer.data)])
            self.problems += [_damaged(damage) for damage in verify_blocks(read, buffer)]
            self.progress(read.num_bytes)

    def check_chunks(self, unusable: set[int]) -> None:
        """Check that the files hold every chunk of every tensor."""
        for tensor in self.manifest.tensors.values():
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


def _damaged(damage: Damage) -> Problem:
    return Problem(
        message=str(damage),
        file=damage.file.name,
        start=damage.start,
        end=damage.end,
        tensors=tuple(dict.fromkeys(key.partition("[")[0] for key in damage.keys)),
    )
