"""Verification of a whole checkpoint: every byte of every file, all faults listed."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtckpt.errors import CheckpointError, PlacementError

from ..dtensor.geometry.box import Box
from ..storage.base import Store
from .files.datafile import Entry
from .files.manifest import FileRecord, Manifest
from .files.stored_data import NUM_OPENING, Damage, DataFile
from .formats.opening import open_place, read_manifest, stored_data
from .reading.whole_files import stretches

_MOST_PROBLEMS = 10_000
_MOST_LOOKUPS = 200_000
"""Chunks that are looked for to name tensors beside other problems: with every file missing, every
tensor of every file would be."""
_LOST = 1 << 70
"""More elements than a tensor has: whose lender is missing, which has been said."""


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
    """Bytes that were read, and compared with a checksum if the format has them."""
    has_checksums: bool
    """Whether it has. Of checkpoints of others only names, shapes and lengths can be compared."""
    problems: tuple[Problem, ...]
    """Every fault, up to ten thousand; empty if the checkpoint is intact."""


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
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    manifest = read_manifest(store)
    return _Verification(store, manifest, on_progress).run()


class _Verification:
    def __init__(
        self, store: Store, manifest: Manifest, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.store = store
        self.manifest = manifest
        self.data = stored_data(store, manifest)
        self.on_progress = on_progress
        decoded = (r.size - r.region_bytes + r.data_bytes for r in manifest.files)
        self.total = sum(decoded)
        self.checked = 0
        self.problems: list[Problem] = []
        self.stored = {tensor.stored_name: tensor for tensor in manifest.tensors.values()}
        self.held: Counter[str] = Counter()
        """Elements of every stored tensor for which there is a chunk, whether intact or not."""
        self.lookups = _MOST_LOOKUPS

    def run(self) -> VerifyReport:
        unusable: set[int] = set()
        for record in self.records():
            try:
                file = self.data.file(record.rank, "all")
                self.progress(record.size - record.region_bytes)
                self.check_blocks(file, file.layout.entries.values())
                self.count(record.rank, file.layout.entries.values())
                self.check_borrowed(record.rank, file)
            except CheckpointError as error:
                unusable.add(record.rank)
                self.report(self.unusable_file(record, error))
            self.data.forget(record.rank)
        self.check_chunks(unusable)
        return VerifyReport(
            url=self.store.url,
            num_files=len(self.manifest.files),
            num_tensors=len(self.manifest.tensors),
            bytes_checked=self.checked,
            has_checksums=self.manifest.is_ours,
            problems=tuple(self.problems),
        )

    def records(self) -> Iterator[FileRecord]:
        """Yield all files; those of a store that is slow to answer are opened some at a time."""
        files = self.manifest.files
        for start in range(0, len(files), NUM_OPENING):
            some = files[start : start + NUM_OPENING]
            self.data.open_ahead([record.rank for record in some], "all")
            yield from some

    def report(self, *problems: Problem) -> None:
        """Add to the list, which a file of nothing but damage does not make as long as itself."""
        room = _MOST_PROBLEMS - len(self.problems)
        self.problems += problems[: max(room, 0)]
        if 0 <= room < len(problems):
            more = f"there are more problems than the {_MOST_PROBLEMS} that are listed here"
            self.problems.append(Problem(message=f"{self.store.url}: {more}"))

    def unusable_file(self, record: FileRecord, error: CheckpointError) -> Problem:
        """Return the problem of a file that as a whole cannot be read or understood."""
        names = tuple(self.tensors_of(record.rank))
        others = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return Problem(
            message=f"{error}. Of no use now: bytes 0 to {record.size} with "
            f"{', '.join(names[:8]) or 'whatever is in it'}{others}",
            file=self.manifest.path_of(record),
            start=0,
            end=record.size,
            tensors=names,
        )

    def tensors_of(self, rank: int) -> Iterator[str]:
        """Yield the names of tensors of which a rank wrote something, unless it takes too long."""
        for tensor in self.manifest.tensors.values():
            self.lookups -= len(tensor.writers)
            if self.lookups < 0:
                return
            if any(tensor.chunks_of(rank)):
                yield tensor.name

    def check_borrowed(self, rank: int, file: DataFile) -> None:
        """Verify what a file refers to in earlier checkpoints."""
        by_id: dict[str, list[str]] = {}
        for key, file_id in file.layout.references.items():
            if key in file.layout.entries:
                continue  # which readers prefer
            by_id.setdefault(file_id, []).append(key)
        self.data.open_ahead(by_id, "all")
        for file_id, keys in by_id.items():
            try:
                lender = self.data.borrowed(file_id, keys[0])
            except CheckpointError as error:
                names = tuple(dict.fromkeys(key.partition("[")[0] for key in keys))
                self.report(Problem(message=str(error), tensors=names))
                for key in keys:
                    self.held[key.partition("[")[0]] = _LOST
                continue
            # What the file has not is found missing with the other chunks.
            found = [e for key in keys if (e := lender.layout.entries.get(key)) is not None]
            self.total += sum(entry.num_bytes for entry in found)
            self.check_blocks(lender, sorted(found, key=lambda entry: entry.start))
            self.count(rank, found)

    def check_blocks(self, file: DataFile, entries: Iterable[Entry]) -> None:
        """Verify all blocks of some chunks, given in file order."""
        for stretch in stretches(file, entries):
            self.report(*map(_damaged, stretch.damaged))
            self.progress(stretch.num_chunk_bytes)

    def count(self, rank: int, entries: Iterable[Entry]) -> None:
        """Count the elements of chunks that a rank was to write; all else is of no use."""
        for entry in entries:
            name, bracket, _ = entry.key.partition("[")
            tensor = self.stored.get(name)
            if tensor is None or entry.dtype is not tensor.dtype:
                continue
            try:
                box = Box.parse(entry.key[len(name) :]) if bracket else Box.whole(tensor.shape)
                found = next(tensor.chunks_meeting(box), None)
            except PlacementError:
                continue  # of another rank of dims, or outside of the tensor
            is_it = found is not None and found[:2] == (rank, box) and tensor.key(box) == entry.key
            if is_it and entry.shape == tensor.dtype.file_shape(box.sizes):
                self.held[name] += box.numel

    def check_chunks(self, unusable: set[int]) -> None:
        """Name a chunk of every tensor of which the files do not hold all elements."""
        for tensor in self.manifest.tensors.values():
            held = self.held[tensor.stored_name]
            if math.prod(tensor.shape) in (held, 0) or held >= _LOST:
                continue
            try:
                for rank, chunk, _ in tensor.chunks_meeting(Box.whole(tensor.shape)):
                    self.lookups -= 1
                    if self.lookups < 0:
                        break
                    if rank not in unusable:
                        self.data.entry(rank, tensor, chunk)
                if unusable and self.lookups >= 0:
                    continue  # nothing else is missing
                message = f"only {held} of the {math.prod(tensor.shape)} elements of tensor "
                message = f"{self.store.url}: {message}{tensor.name!r} are in the data files"
            except CheckpointError as error:
                message = str(error)
            self.report(Problem(message=message, tensors=(tensor.name,)))

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
        tensors=(damage.key.partition("[")[0],),
    )
