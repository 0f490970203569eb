"""The data files of a checkpoint, opened and checked once each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from dtckpt.errors import CheckpointError, Corrupt, ObjectNotFound, StorageError

from ...dtensor.geometry.box import Box
from ...storage.base import ObjectInfo, ReadRequest, Store
from ...storage.held import HeldObject
from ..state.limits import check_metadata_bytes
from .blocks import DIGEST_BYTES, digest, num_blocks
from .datafile import Entry, FileLayout, parse_header
from .manifest import BorrowedFile, FileRecord, Manifest
from .stored_tensor import StoredTensor

if TYPE_CHECKING:
    from ..compression.stored_blocks import StoredBlocks

_NUM_ASKING = 16
NUM_OPENING = 32
"""Files that are opened at a time where that takes long."""
_DEAR_REQUEST_BYTES = 64 << 10
"""It does where a request costs as much as these."""
_HELD_BYTES = 64 << 20
"""Most bytes of small files that stay in memory as they were read to be opened."""


@dataclass(frozen=True, slots=True)
class SummedRecord:
    """Bytes of a file that have a CRC-32, which whoever reads all of them can compare."""

    start: int
    num_bytes: int
    crc: int
    keys: tuple[str, ...]
    """The chunks that have their elements there."""


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
    blocks: StoredBlocks | None = None
    """How a compressed file is stored."""
    summed: Sequence[SummedRecord] = ()
    """Of a file without checksum table: the records of archives in it that have a CRC-32."""

    def read_each(self, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        """Do what ``Store.read_each`` does for the file as if it was not compressed.

        Requests are then of whole blocks, to be compared with their digests: what cannot be decoded
        is brought as bytes that do not have theirs.
        """
        if self.blocks is None:
            return self.store.read_each(self.name, requests)
        return self.blocks.read_each(self.store, self.name, requests, self._spoil)

    def read_as_stored(self, start: int, data: memoryview) -> memoryview:
        """Fill memory with blocks as ``read_each`` does, and return them as the file has them."""
        if self.blocks is None:
            self.store.read_into(self.name, [ReadRequest(start, data)])
            return data
        span = self.blocks.span(start, start + len(data))
        low, high = self.blocks.place(*span)
        stored = memoryview(bytearray(high - low))
        self.store.read_into(self.name, [ReadRequest(low, stored)])
        self.blocks.decode(span, stored, data, self._spoil)
        return stored

    def _spoil(self, block: int, data: memoryview) -> None:
        data[:] = bytes(len(data))
        if digest(data) == self.table[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]:
            data[:1] = b"\x01"

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
        damaged: list[Damage] = []
        for i in range(len(digests) // DIGEST_BYTES):
            if digests[i * 16 : i * 16 + 16] != self.table[at + i * 16 : at + i * 16 + 16]:
                place = start + i * size, start + min((i + 1) * size, len(data))
                if self.blocks is not None:
                    place = self.blocks.place(at // DIGEST_BYTES + i)
                damaged.append(Damage(file=self, start=place[0], end=place[1], key=entry.key))
        return damaged


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
    """The data files of a checkpoint, opened and checked once each.

    May be pickled, as its store may: another process opens the files itself.
    """

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
        self._held_bytes = 0
        self._lock = threading.Lock()
        """Of the files."""
        self._counting = threading.Lock()
        """Of the bytes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StoredData, open_foreign=self._open_foreign), (self.store, self.manifest)

    def file(self, rank: int, needed_by: str) -> DataFile:
        """Return the data file of a rank; Corrupt unless it is the one that was written."""
        self._open_all({rank: needed_by})
        return self._files[rank]

    def borrowed(self, file_id: str, needed_by: str) -> DataFile:
        """Return a data file of an earlier checkpoint; Corrupt unless it is the one referred to."""
        self._open_all({file_id: needed_by})
        return self._files[file_id]

    def open_for(self, chunks: Iterable[tuple[int, str, str]]) -> None:
        """Open the files of some chunks, several at a time where requests take long.

        Chunks are given by rank, key and the name of their tensor. Errors as of ``file`` and
        ``borrowed``.
        """
        chunks = list(chunks)
        self._open_all({rank: tensor for rank, _, tensor in reversed(chunks)})
        lenders: dict[int | str, str] = {}
        for rank, key, tensor in chunks:
            if file_id := self._files[rank].layout.references.get(key):
                lenders.setdefault(file_id, tensor)
        self._open_all(lenders)

    def open_ahead(self, keys: Iterable[int | str], needed_by: str) -> None:
        """Open files, of ranks or by id, several at a time where requests take long, else none.

        ``file`` and ``borrowed`` tell which cannot be opened, and why.
        """
        if self._is_dear:
            with suppress(CheckpointError):
                self._open_all(dict.fromkeys(keys, needed_by))

    @property
    def _is_dear(self) -> bool:
        """Whether requests take long."""
        return self.store.request_bytes >= _DEAR_REQUEST_BYTES

    def _open_all(self, needed: Mapping[int | str, str]) -> None:
        """Open files, of ranks or by id, that are not open; each is given with what needs it."""
        if needed.keys() <= self._files.keys():
            return
        with self._lock:
            works = {
                key: self._work(key, needed_by)
                for key, needed_by in needed.items()
                if key not in self._files
            }

            def work(key: int | str) -> None:
                self._files[key] = works[key]()  # though others fail

            if len(works) == 1 or not self._is_dear:
                for key in works:
                    work(key)
                return
            with ThreadPoolExecutor(min(NUM_OPENING, len(works)), "dtckpt-open") as pool:
                list(pool.map(work, works))

    def _work(self, key: int | str, needed_by: str) -> Callable[[], DataFile]:
        """Return what opens a file; Corrupt if the manifest does not list it."""
        if isinstance(key, int):
            if key not in self._records:
                raise Corrupt(
                    f"{self.store.url}: tensor {needed_by!r} needs the data file of rank "
                    f"{key}, which the manifest does not list"
                )
            return partial(self._open, self.store, self._records[key], self.manifest.save_id)
        if key not in self._borrowed:
            raise Corrupt(
                f"{self.store.url}: tensor {needed_by!r} needs the file {key!r} of an "
                "earlier checkpoint, which the manifest does not list"
            )
        return partial(self._open_borrowed, self._borrowed[key], needed_by)

    def _open_borrowed(self, file: BorrowedFile, needed_by: str) -> DataFile:
        try:
            store = self.store.sibling(file.source)
            return self._open(store, file.record, file.save_id, file.source)
        except Corrupt as error:
            raise Corrupt(
                f"{self.store.url} is incremental and tensor {needed_by!r} has not changed "
                f"since the checkpoint {file.source!r} beside it, which is needed: {error}"
            ) from error

    def forget(self, rank: int) -> None:
        """Let go of the data file of a rank; it is opened anew where it is needed again."""
        with self._lock:
            file = self._files.pop(rank, None)
            if file is not None:
                is_held = isinstance(file.store, HeldObject)
                self._forget(file.record.table_memory, file.record.size if is_held else 0)

    def check_unchanged(self) -> None:
        """Raise Corrupt if a file without checksums is not as it was when it was opened."""
        with self._lock:
            files = [file for file in self._files.values() if file.seen is not None]
        if files:
            with ThreadPoolExecutor(_NUM_ASKING, thread_name_prefix="dtckpt-asking") as pool:
                list(pool.map(DataFile.check_unchanged, files))

    def _open(
        self, store: Store, record: FileRecord, save_id: str, source: str | None = None
    ) -> DataFile:
        """Open a file, unless the tables of all open ones take more memory than they may."""
        with self._counting:
            total = self._table_bytes + record.table_memory
            check_metadata_bytes(total, f"the checksum tables of {self.store.url}")
            self._table_bytes = total
            room = _HELD_BYTES - self._held_bytes
            held = record.size if record.size <= min(store.request_bytes, room) else 0
            self._held_bytes += held
        try:
            if self._open_foreign is not None:
                return self._open_foreign(store, self.manifest.stored or self.manifest, record)
            return open_data_file(store, record, save_id, source, hold=held > 0)
        except BaseException:
            self._forget(record.table_memory, held)
            raise

    def _forget(self, table_memory: int, held_bytes: int) -> None:
        with self._counting:
            self._table_bytes -= table_memory
            self._held_bytes -= held_bytes

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
        if entry is None or entry.shape != shape or entry.dtype is not tensor.dtype.in_file:
            found = "no such entry" if entry is None else f"{entry.dtype.code}{list(entry.shape)}"
            raise Corrupt(
                f"{file.where}: expected entry {key!r} of "
                f"{tensor.dtype.in_file.code}{list(shape)}, got {found}"
            )
        return file, entry


def check_same(where: str, seen: ObjectInfo, now: ObjectInfo) -> None:
    """Raise Corrupt if length, time or identity tell that a file was written to since it was seen.

    Stores need not tell the time, nor the identity.
    """
    is_timed = seen.modified is not None and now.modified is not None
    is_replaced = "" not in (seen.identity, now.identity) and seen.identity != now.identity
    if seen.size != now.size or is_replaced or (is_timed and seen.modified != now.modified):
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
            f"it ({expected} bytes): {error.strerror or error}. Restore the file or load another "
            "checkpoint"
        ) from error
    if info.size != expected:
        raise Corrupt(
            f"{where}: the file has {info.size} bytes, expected {expected}; it was truncated "
            "or replaced. Load another checkpoint"
        )
    return info


def open_data_file(
    store: Store,
    record: FileRecord,
    save_id: str,
    source: str | None = None,
    *,
    hold: bool = False,
) -> DataFile:
    """Open a data file that dtckpt has written; Corrupt unless it is the one of the record.

    Its size is not asked for: what is read of it, from either end, has to have its digests. Where
    it is to ``hold`` the file, all of that is read in one request and kept.
    """
    name = record.path(save_id)
    where = f"{store.url}/{name}"
    check_metadata_bytes(2 * record.header_bytes, f"the header of {where}")
    table_start = record.size - record.table_bytes
    whole = memoryview(bytearray(record.size)) if hold else memoryview(b"")
    header, table = whole[: record.header_bytes], whole[table_start:]
    requests = [ReadRequest(0, whole)] if hold else []
    if not hold:
        header, table = (
            memoryview(bytearray(n)) for n in (record.header_bytes, record.table_bytes)
        )
        requests = [ReadRequest(0, header), ReadRequest(table_start, table)]
    try:
        store.read_into(name, requests)
    except StorageError:
        check_size(store, name, record.size)
        raise
    if digest(header).hex() != record.header_digest:
        check_size(store, name, record.size)
        raise Corrupt(
            f"{where}: bytes 0 to {record.header_bytes} (header) are damaged or belong to "
            "another save. Load another checkpoint"
        )
    layout = parse_header(bytes(header), where)
    if layout.save_id != save_id:
        raise Corrupt(f"{where}: the file belongs to the save {layout.save_id!r}, not this one")
    told = layout.data_bytes, layout.table_bytes, layout.is_compressed
    if told != (record.data_bytes, record.table_bytes, record.is_compressed):
        raise Corrupt(
            f"{where}: the header describes {layout.data_bytes} bytes of data and a table of "
            f"{layout.table_bytes}, the manifest {record.data_bytes} and {record.table_bytes}; "
            "they are not of one save. Load another checkpoint"
        )
    if digest(table).hex() != record.table_digest:
        check_size(store, name, record.size)
        raise Corrupt(
            f"{where}: bytes {table_start} to {record.size} (checksum table) are "
            "damaged or belong to another save. Load another checkpoint"
        )
    blocks = _stored_blocks(layout, bytes(table), record, where) if record.is_compressed else None
    found = HeldObject(store, name, whole) if hold else store
    return DataFile(found, name, where, layout, bytes(table), record, source, blocks=blocks)


def _stored_blocks(
    layout: FileLayout, table: bytes, record: FileRecord, where: str
) -> StoredBlocks:
    """Return where the blocks of a compressed file lie; Corrupt unless they fill it."""
    from ..compression.stored_blocks import StoredBlocks  # which needs NumPy

    chunks = [(entry.num_bytes, entry.dtype.itemsize) for entry in layout.entries.values()]
    lengths = table[DIGEST_BYTES * layout.num_blocks :]
    try:
        blocks = StoredBlocks(layout.data_start, chunks, layout.block_bytes, lengths)
    except ValueError as error:
        raise Corrupt(f"{where}: malformed table of stored lengths: {error}") from error
    if blocks.stored_bytes != record.stored_bytes:
        raise Corrupt(
            f"{where}: the blocks have {blocks.stored_bytes} bytes by their table, the manifest "
            f"tells {record.stored_bytes}; they are not of one save. Load another checkpoint"
        )
    return blocks
