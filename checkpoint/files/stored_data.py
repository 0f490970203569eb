"""The data files of a checkpoint, opened and checked once each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from dtckpt.errors import Corrupt, ObjectNotFound

from ...dtensor.geometry.box import Box
from ...storage.base import ObjectInfo, ReadRequest, Store
from ..state.limits import check_metadata_bytes
from .blocks import DIGEST_BYTES, digest, num_blocks
from .datafile import Entry, FileLayout, parse_header
from .manifest import FileRecord, Manifest, data_path
from .stored_tensor import StoredTensor

_NUM_ASKING = 16


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """An intact header and checksum table, with the blocks still to be verified."""

    store: Store
    """Store of the checkpoint that wrote the file: this one or an earlier one beside it."""
    name: str
    """Name in that store."""
    where: str
    layout: FileLayout
    table: bytes
    record: FileRecord
    source: str | None = None
    """Name of the checkpoint that wrote it, unless it is the one that is read."""
    seen: ObjectInfo | None = None
    """Of a file without checksums: what the store told of it before any of it was read."""

    def check_unchanged(self) -> None:
        """Raise Corrupt if a file without checksums is not, as it was when it was opened.

        Whoever has read of it asks this before anything that was read counts: nothing else tells
        elements of two versions apart.
        """
        if self.seen is None:
            return
        try:
            now = self.store.stat(self.name)
        except ObjectNotFound as error:
            raise Corrupt(
                f"{self.where}: the file was taken away while it was read. Load it anew"
            ) from error
        check_same(self.where, self.seen, now)

    def digests(self, entry: Entry) -> bytes:
        """Return the digests of a chunk's blocks, one after the other."""
        count = num_blocks(entry.num_bytes, self.layout.block_bytes)
        start = entry.first_block * DIGEST_BYTES
        return self.table[start : start + count * DIGEST_BYTES]

    def damaged(self, entry: Entry, low: int, data: memoryview) -> list[Damage]:
        """Return the blocks of a chunk that do not have their digests.

        ``data`` is whole blocks, of which the first starts ``low`` bytes into the chunk.
        """
        if self.seen is not None:
            return []
        size = self.layout.block_bytes
        at = (entry.first_block + low // size) * DIGEST_BYTES
        if len(data) <= size:
            digests = digest(data)
        else:
            digests = b"".join([digest(data[i : i + size]) for i in range(0, len(data), size)])
        if digests == self.table[at : at + len(digests)]:
            return []
        start = self.layout.data_start + entry.start + low
        return [
            Damage(
                file=self,
                start=start + i * size,
                end=start + min((i + 1) * size, len(data)),
                key=entry.key,
            )
            for i in range(len(digests) // DIGEST_BYTES)
            if digests[i * 16 : i * 16 + 16] != self.table[at + i * 16 : at + i * 16 + 16]
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A block whose bytes are not those that were written."""

    file: DataFile
    start: int
    """First byte in the file."""
    end: int
    key: str
    """The chunk that the block belongs to."""

    def __str__(self) -> str:
        return (
            f"{self.file.where}: bytes {self.start} to {self.end} are damaged; "
            f"they belong to {self.key}"
        )


OpenForeign = Callable[[Store, Manifest, FileRecord], DataFile]
"""Opens a file that another program wrote; Corrupt unless it is the one of the record."""


class StoredData:
    """The data files of a checkpoint, opened and checked once each."""

    def __init__(
        self, store: Store, manifest: Manifest, *, open_foreign: OpenForeign | None = None
    ) -> None:
        self.store = store
        self.manifest = manifest
        self._open_foreign = open_foreign
        self._records = {record.rank: record for record in manifest.files}
        self._borrowed = {file.id: file for file in manifest.borrowed}
        self._files: dict[int | str, DataFile] = {}
        self._table_bytes = 0
        self._lock = threading.Lock()

    def file(self, rank: int, needed_by: str) -> DataFile:
        """Return the data file of a rank; Corrupt unless it is the one that was written."""
        with self._lock:
            if rank not in self._files:
                if rank not in self._records:
                    raise Corrupt(
                        f"{self.store.url}: tensor {needed_by!r} needs the data file of rank "
                        f"{rank}, which the manifest does not list"
                    )
                record, save_id = self._records[rank], self.manifest.save_id
                self._files[rank] = self._open(self.store, record, save_id, None)
            return self._files[rank]

    def borrowed(self, file_id: str, needed_by: str) -> DataFile:
        """Return a data file of an earlier checkpoint; Corrupt unless it is the one referred to."""
        with self._lock:
            if file_id not in self._files:
                if file_id not in self._borrowed:
                    raise Corrupt(
                        f"{self.store.url}: tensor {needed_by!r} needs the file {file_id!r} of an "
                        "earlier checkpoint, which the manifest does not list"
                    )
                file = self._borrowed[file_id]
                store = self.store.sibling(file.source)
                try:
                    self._files[file_id] = self._open(store, file.record, file.save_id, file.source)
                except Corrupt as error:
                    raise Corrupt(
                        f"{self.store.url} is incremental and tensor {needed_by!r} has not changed "
                        f"since the checkpoint {file.source!r} beside it, which is needed: {error}"
                    ) from error
            return self._files[file_id]

    def forget(self, rank: int) -> None:
        """Let go of the data file of a rank; it is opened anew where it is needed again."""
        with self._lock:
            file = self._files.pop(rank, None)
            if file is not None:
                self._table_bytes -= len(file.table)

    def check_unchanged(self) -> None:
        """Raise Corrupt if a file without checksums is not as it was when it was opened."""
        with self._lock:
            files = [file for file in self._files.values() if file.seen is not None]
        if files:
            with ThreadPoolExecutor(_NUM_ASKING, thread_name_prefix="dtckpt-asking") as pool:
                list(pool.map(DataFile.check_unchanged, files))

    def _open(self, store: Store, record: FileRecord, save_id: str, source: str | None) -> DataFile:
        """Open a file, unless the tables of all open ones take more memory than they may."""
        total = self._table_bytes + record.table_bytes
        check_metadata_bytes(total, f"the checksum tables of {self.store.url}")
        if self._open_foreign is not None:
            file = self._open_foreign(store, self.manifest.stored or self.manifest, record)
        else:
            file = open_data_file(store, record, save_id, source)
        self._table_bytes = total
        return file

    def entry(self, rank: int, tensor: StoredTensor, chunk: Box) -> tuple[DataFile, Entry]:
        """Return where a chunk lies; Corrupt unless its file has it with dtype and sizes."""
        shape = tensor.dtype.file_shape(chunk.sizes)
        return self.find(rank, tensor, tensor.key(chunk), shape)

    def find(
        self, rank: int, tensor: StoredTensor, key: str, shape: tuple[int, ...]
    ) -> tuple[DataFile, Entry]:
        """Return the entry of a key; Corrupt unless it has the tensor's dtype and a file shape."""
        file = self._files.get(rank) or self.file(rank, tensor.name)
        entry = file.layout.entries.get(key)
        if entry is None and key in file.layout.references:
            file = self.borrowed(file.layout.references[key], tensor.name)
            entry = file.layout.entries.get(key)
        if entry is None or entry.shape != shape or entry.dtype is not tensor.dtype:
            found = "no such entry" if entry is None else f"{entry.dtype.code}{list(entry.shape)}"
            raise Corrupt(
                f"{file.where}: expected entry {key!r} of "
                f"{tensor.dtype.code}{list(shape)}, got {found}"
            )
        return file, entry


def check_same(where: str, seen: ObjectInfo, now: ObjectInfo) -> None:
    """Raise Corrupt if length or time tell that a file was written to since it was seen.

    Stores need not tell the time.
    """
    is_timed = seen.modified is not None and now.modified is not None
    if seen.size != now.size or (is_timed and seen.modified != now.modified):
        raise Corrupt(
            f"{where}: the file was written to while it was read, and has no checksums that would "
            f"tell what is of which version: it had {seen.size} bytes{_written(seen)}, and has "
            f"{now.size}{_written(now)}. Load it anew"
        )


def _written(info: ObjectInfo) -> str:
    """Return when a file was written, for messages."""
    if info.modified is None:
        return ""
    return f" written at {datetime.fromtimestamp(info.modified, UTC).isoformat()}"


def check_size(store: Store, name: str, expected: int) -> ObjectInfo:
    """Return what is told of a file; Corrupt unless it is there and has so many bytes."""
    where = f"{store.url}/{name}"
    try:
        info = store.stat(name)
    except ObjectNotFound as error:
        raise Corrupt(
            f"{where}: this data file is missing, though the checkpoint was committed with "
            f"it ({expected} bytes): {error}. Restore the file or load another checkpoint"
        ) from error
    if info.size != expected:
        raise Corrupt(
            f"{where}: the file has {info.size} bytes, expected {expected}; it was truncated "
            "or replaced. Load another checkpoint"
        )
    return info


def open_data_file(
    store: Store, record: FileRecord, save_id: str, source: str | None = None
) -> DataFile:
    """Open a data file that dtckpt has written; Corrupt unless it is the one of the record."""
    name = data_path(save_id, record.rank)
    where = f"{store.url}/{name}"
    check_size(store, name, record.size)
    check_metadata_bytes(2 * record.header_bytes, f"the header of {where}")
    table_start = record.size - record.table_bytes
    ends = bytearray(record.header_bytes), bytearray(record.table_bytes)
    store.read_into(name, [ReadRequest(0, ends[0]), ReadRequest(table_start, ends[1])])
    header, table = map(bytes, ends)
    if digest(header).hex() != record.header_digest:
        raise Corrupt(
            f"{where}: bytes 0 to {record.header_bytes} (header) are damaged or belong to "
            "another save. Load another checkpoint"
        )
    layout = parse_header(header, where)
    if layout.save_id != save_id:
        raise Corrupt(f"{where}: the file belongs to the save {layout.save_id!r}, not this one")
    if (layout.data_bytes, layout.size) != (record.data_bytes, record.size):
        raise Corrupt(
            f"{where}: the header describes {layout.data_bytes} bytes of data in a file of "
            f"{layout.size}, the manifest {record.data_bytes} in {record.size}; they are not of "
            "one save. Load another checkpoint"
        )
    if digest(table).hex() != record.table_digest:
        raise Corrupt(
            f"{where}: bytes {table_start} to {record.size} (checksum table) are "
            "damaged or belong to another save. Load another checkpoint"
        )
    return DataFile(store, name, where, layout, table, record, source)
