"""Verification of a whole checkpoint: every byte of every file, all faults listed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.errors import Corrupt, LayoutMismatch

from ..dtensor.box import Box
from ..storage.base import ReadRequest, Store
from ..storage.open import open_store
from .manifest import Manifest, read_manifest
from .reading import MAX_READ_BYTES, DataFile, Read, StoredData, verify_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    url: str
    num_files: int
    num_tensors: int
    bytes_checked: int
    problems: tuple[str, ...]
    """Every fault, naming file, byte range and tensors; empty if the checkpoint is intact."""


def verify(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read a checkpoint completely and report every fault.

    ``on_progress(done, total)`` is called with bytes. Faults of data files are collected; raises
    NotCommitted or Corrupt only where the manifest itself cannot be used.
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
        self.done = 0
        self.problems: list[str] = []

    def run(self) -> VerifyReport:
        broken: set[int] = set()
        for record in self.manifest.files:
            try:
                self.check_blocks(self.data.file(record.rank, "all"))
            except Corrupt as error:
                broken.add(record.rank)
                self.problems.append(str(error))
            self.progress(record.header_bytes)
        self.check_chunks(broken)
        return VerifyReport(
            url=self.store.url,
            num_files=len(self.manifest.files),
            num_tensors=len(self.manifest.tensors),
            bytes_checked=self.total,
            problems=tuple(self.problems),
        )

    def check_blocks(self, file: DataFile) -> None:
        """Verify the data region, block by block."""
        blocks = -(-file.layout.data_bytes // file.layout.block_bytes)
        step = MAX_READ_BYTES // file.layout.block_bytes
        for first in range(0, blocks, step):
            read = Read(
                file=file, first_block=first, end_block=min(first + step, blocks), pieces=()
            )
            buffer = np.empty(read.num_bytes, dtype=np.uint8)
            offset = file.layout.data_start + read.start
            self.store.read_into(file.name, [ReadRequest(offset, buffer.data)])
            self.problems += verify_blocks(read, buffer)
            self.progress(read.num_bytes)

    def check_chunks(self, broken: set[int]) -> None:
        """Check that the files hold every chunk of every tensor."""
        for tensor in self.manifest.tensors.values():
            try:
                for rank, chunk, _ in tensor.chunks_meeting(Box.whole(tensor.shape)):
                    if rank not in broken:
                        self.data.entry(rank, tensor, chunk)
            except (Corrupt, LayoutMismatch) as error:
                self.problems.append(str(error))

    def progress(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.on_progress is not None:
            self.on_progress(min(self.done, self.total), self.total)
