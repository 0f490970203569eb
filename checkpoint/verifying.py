"""Verification of a whole checkpoint: every byte of every file, all faults listed."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dtckpt.errors import (
    AccessDenied,
    CheckpointError,
    Corrupt,
    NotCommitted,
    ObjectNotFound,
    PlacementError,
    StorageError,
)
from dtckpt.logs import logger_of

from ..dtensor.geometry.box import Box
from ..storage.base import Store
from .files.committing import data_places, wrong_files
from .files.datafile import Entry
from .files.manifest import FileRecord, Manifest
from .files.stored_data import NUM_OPENING, Damage, DataFile, SummedRecord
from .formats.beside import notes_of
from .formats.opening import open_place, read_manifest, stored_data
from .reading import limits
from .reading.whole_files import Batch, Checker, batches, damage_of

logger = logger_of("checkpoint")

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
    """Whether all bytes of tensors have some: blocks of ours, or records of archives of torch.

    Of other formats only names, shapes and lengths can be compared.
    """
    problems: tuple[Problem, ...]
    """Every fault, up to ten thousand; empty if the checkpoint is intact."""
    notes: tuple[str, ...] = ()
    """Of files of other programs: what beside them, or in them, is no part of the checkpoint."""


def verify(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read a checkpoint completely and report every fault.

    Files are read by several threads, in bounded memory. ``on_progress(done, total)`` is called
    with bytes, from any thread but never from two at once. Faults of data files are collected, and
    what could not be read beside them. Raises NotCommitted or Corrupt only where the manifest
    itself cannot be used, and StorageError, or what else a file was refused with, where that is all
    that was found: nothing is known to be damaged then, and not all was read.
    """
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    return Verifier().verify(store, on_progress)


_Longer = tuple[str, int, int]
"""The name of a file, the size that it was saved with, and the one it has."""


class Verifier:
    """Verifies checkpoints one after the other; files that several refer to are read once.

    That is so where those that wrote them come first, as they do in the order of their steps.
    """

    def __init__(self) -> None:
        self._whole: dict[str, tuple[Damage, ...]] = {}
        """What is damaged of the files that have been read as a whole, by their URLs."""
        self._longer: dict[str, list[_Longer]] = {}
        """Which files of a save are longer, for those of which all have been looked at."""

    def verify(
        self, store: Store, on_progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Verify a checkpoint as the function ``verify`` does."""
        manifest = read_manifest(store)
        return _Verification(store, manifest, on_progress, self._whole, self._longer).run()


@dataclass(slots=True, eq=False)
class _Reading:
    """A file that is read, as a whole or, if it is one of an earlier checkpoint, in part."""

    where: str
    record: FileRecord | None
    """None if it is read in part."""
    unsure: DataFile | None
    """The file if it has no checksums."""
    damaged: list[Damage] = field(default_factory=list[Damage])
    error: CheckpointError | None = None


_Job = tuple[_Reading, DataFile, Batch | SummedRecord]


class _Verification:
    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        on_progress: Callable[[int, int], None] | None,
        whole: dict[str, tuple[Damage, ...]],
        longer: dict[str, list[_Longer]],
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
        self.whole = whole
        self.longer = longer
        self.found: list[_Reading | tuple[Problem, CheckpointError | None]] = []
        """By files, in the order of the manifest; problems with what they were refused with."""
        self.is_damaged = False
        self.has_checksums = True
        """Whether all that was read so far has some."""
        self.failed: CheckpointError | None = None
        """Why something could not be read that may be intact."""
        self.unusable: set[int] = set()
        self.lock = threading.Lock()

    def run(self) -> VerifyReport:
        self.read_all()
        for found in self.found:
            if isinstance(found, _Reading):
                self.report_reading(found)
            else:
                self.report(found[0], error=found[1])
        self.check_chunks(self.unusable)
        self.check_sizes()
        if self.failed is not None and not self.is_damaged:
            raise self.failed
        return VerifyReport(
            url=self.store.url,
            num_files=len(self.manifest.files),
            num_tensors=len(self.manifest.tensors),
            bytes_checked=self.checked,
            has_checksums=self.has_checksums,
            problems=tuple(self.problems),
            notes=tuple(notes_of(self.manifest)),
        )

    def read_all(self) -> None:
        """Read all files by several threads, each of which takes the next batch of any of them."""
        jobs, taking, stop = self.jobs(), threading.Lock(), threading.Event()

        def work() -> None:
            checker = Checker()
            while not stop.is_set():
                with taking:
                    job = next(jobs, None)
                if job is None:
                    return
                self.check(checker, *job)

        num = limits.num_readers([self.store], None)
        with ThreadPoolExecutor(num, thread_name_prefix="dtckpt-verify") as pool:
            try:
                for future in [pool.submit(work) for _ in range(num)]:
                    future.result()
            finally:
                stop.set()

    def jobs(self) -> Iterator[_Job]:
        """Yield the batches of all files, which are opened on the way."""
        for record in self.records():
            try:
                file = self.data.file(record.rank, "all")
            except CheckpointError as error:
                self.unusable.add(record.rank)
                self.found.append((self.unusable_file(record, error), error))
                continue
            self.progress(record.size - record.region_bytes)
            entries = file.layout.entries.values()
            self.count(record.rank, entries)
            yield from self.jobs_of(file, record, entries)
            yield from self.borrowed_jobs(record.rank, file)
            self.data.forget(record.rank)

    def jobs_of(
        self, file: DataFile, record: FileRecord | None, entries: Iterable[Entry]
    ) -> Iterator[_Job]:
        """Yield the batches of a file until one of them cannot be read."""
        reading = _Reading(file.where, record, file if file.seen is not None else None)
        self.found.append(reading)
        in_records = {key for record in file.summed for key in record.keys}
        others = [entry for entry in entries if entry.key not in in_records]
        self.has_checksums &= file.seen is None or not others
        for batch in (*file.summed, *batches(file, others)):
            if reading.error is not None:
                return
            yield reading, file, batch

    def check(
        self, checker: Checker, reading: _Reading, file: DataFile, batch: Batch | SummedRecord
    ) -> None:
        """Read a batch, or a record of an archive, and keep what is damaged of it."""
        try:
            if isinstance(batch, SummedRecord):
                damaged, num_bytes = damage_of(file, batch), batch.num_bytes
            else:
                damaged = checker.damaged(file, batch)
                num_bytes = sum(span.end - span.start for span in batch)
        except CheckpointError as error:
            reading.error = error
            return
        with self.lock:
            room = (
                _MOST_PROBLEMS + 1 - len(reading.damaged)
            )  # of which one tells that there are more
            reading.damaged += damaged[:room]
        self.progress(num_bytes)

    def report_reading(self, reading: _Reading) -> None:
        """Add what was found in a file to the list."""
        try:
            if reading.error is None and reading.unsure is not None:
                reading.unsure.check_unchanged()
        except CheckpointError as error:
            reading.error = error
        damaged = sorted(reading.damaged, key=lambda damage: damage.start)
        if reading.record is None:
            self.report(*map(self.damaged, damaged))
            if reading.error is not None:
                self.report(Problem(message=str(reading.error)), error=reading.error)
        elif reading.error is not None:
            self.unusable.add(reading.record.rank)
            self.report(*map(self.damaged, damaged))
            problem = self.unusable_file(reading.record, reading.error)
            self.report(problem, error=reading.error)
        else:
            self.whole[reading.where] = tuple(damaged)
            self.report(*map(self.damaged, damaged))

    def records(self) -> Iterator[FileRecord]:
        """Yield all files; those of a store that is slow to answer are opened some at a time."""
        files = self.manifest.files
        for start in range(0, len(files), NUM_OPENING):
            some = files[start : start + NUM_OPENING]
            self.data.open_ahead([record.rank for record in some], "all")
            yield from some

    def report(self, *problems: Problem, error: CheckpointError | None = None) -> None:
        """Add to the list, which a file of nothing but damage does not make as long as itself.

        ``error`` is what was raised in place of bytes, if that is the problem.
        """
        if error is not None and not _tells_damage(error):
            self.failed = self.failed or error
        elif problems:
            self.is_damaged = True
        room = _MOST_PROBLEMS - len(self.problems)
        self.problems += problems[: max(room, 0)]
        if 0 <= room < len(problems):
            more = f"there are more problems than the {_MOST_PROBLEMS} that are listed here"
            self.problems.append(Problem(message=f"{self.store.url}: {more}"))

    def damaged(self, damage: Damage) -> Problem:
        """Return the problem of a damaged block."""
        return Problem(
            message=str(damage),
            file=damage.file.name,
            start=damage.start,
            end=damage.end,
            tensors=(self.name_of(damage.key),),
        )

    def name_of(self, key: str) -> str:
        """Return the name of the tensor that a chunk is of, which may have been renamed since."""
        stored = key.partition("[")[0]
        tensor = self.stored.get(stored)
        return stored if tensor is None else tensor.same_as or tensor.name

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
        has_chunks: dict[tuple[int, tuple[int, ...], int], bool] = {}
        for tensor in self.manifest.tensors.values():
            self.lookups -= len(tensor.writers)
            if self.lookups < 0:
                return
            if tensor.same_as is not None:
                continue
            # Very many tensors have the same few layouts, which are one object each.
            key = id(tensor.layout), tensor.writers, tensor.cut
            if key not in has_chunks:
                has_chunks[key] = any(tensor.chunks_of(rank))
            if has_chunks[key]:
                yield tensor.name

    def borrowed_jobs(self, rank: int, file: DataFile) -> Iterator[_Job]:
        """Yield the batches of what a file refers to in earlier checkpoints."""
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
                names = tuple(dict.fromkeys(map(self.name_of, keys)))
                self.found.append((Problem(message=str(error), tensors=names), error))
                for key in keys:
                    self.held[key.partition("[")[0]] = _LOST
                continue
            # What the file has not is found missing with the other chunks.
            found = [e for key in keys if (e := lender.layout.entries.get(key)) is not None]
            self.count(rank, found)
            wanted = set(keys)
            if (known := self.whole.get(lender.where)) is not None:
                self.found += [(self.damaged(d), None) for d in known if d.key in wanted]
                continue
            self.total += sum(entry.num_bytes for entry in found)
            entries = sorted(found, key=lambda entry: entry.start)
            yield from self.jobs_of(lender, None, entries)

    def count(self, rank: int, entries: Iterable[Entry]) -> None:
        """Count the elements of chunks that a rank was to write; all else is of no use."""
        for entry in entries:
            name, bracket, _ = entry.key.partition("[")
            tensor = self.stored.get(name)
            if tensor is None or entry.dtype is not tensor.dtype.in_file:
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
            failed: CheckpointError | None = None
            try:
                whole = Box.whole(tensor.shape)
                for rank, chunk, _ in tensor.chunks_meeting(whole) if self.lookups >= 0 else ():
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
                message, failed = str(error), error
            self.report(Problem(message=message, tensors=(tensor.name,)), error=failed)

    def check_sizes(self) -> None:
        """Name the files that are longer than they were saved; nobody reads what is behind."""
        if not self.manifest.is_ours:
            return
        try:
            for place, save_id, files in data_places(self.store, self.manifest):
                for name, size, found in self.longer_files(place, save_id, files):
                    message = f"the file has {found} bytes, expected {size}; what is behind its end"
                    message = f"{place.url}/{name}: {message} was written after the save"
                    self.report(Problem(message=message, file=name, start=size, end=found))
        except AccessDenied as error:  # who may read but not list can verify all that is read
            logger.warning("%s: not looked for what is behind files: %s", self.store.url, error)
        except CheckpointError as error:
            self.report(Problem(message=str(error)), error=error)

    def longer_files(
        self, place: Store, save_id: str, files: Sequence[FileRecord]
    ) -> Iterable[_Longer]:
        """Return the files that are longer; no request where all there have been looked at."""
        known = self.longer.get(f"{place.url}/{save_id}")
        if known is not None:
            names = {record.path(save_id) for record in files}
            return [longer for longer in known if longer[0] in names]
        found = [
            (record.path(save_id), record.size, size or 0)
            for record, size in wrong_files(place, save_id, files, only_longer=True)
        ]
        if place is self.store:
            self.longer[f"{place.url}/{save_id}"] = found
        return found

    def progress(self, num_bytes: int) -> None:
        with self.lock:
            self.checked += num_bytes
            if self.on_progress is not None:
                self.on_progress(self.checked, self.total)


def _tells_damage(error: CheckpointError) -> bool:
    """Whether an error is about bytes that are wrong, missing, or that a disk cannot read."""
    is_bad_disk = isinstance(error, StorageError) and error.errno == errno.EIO
    return is_bad_disk or isinstance(error, Corrupt | NotCommitted | ObjectNotFound)
