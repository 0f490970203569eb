"""The data files of a checkpoint, opened and checked once each."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dtckpt.errors import Corrupt, ObjectNotFound

from ..dtensor.box import Box
from ..storage.base import Store
from .blocks import DIGEST_BYTES, digest
from .datafile import Entry, FileLayout, parse_header
from .manifest import FileRecord, Manifest
from .plan import StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """An intact header and checksum table, with the blocks still to be verified."""

    name: str
    where: str
    layout: FileLayout
    table: bytes

    def block_digest(self, block: int) -> bytes:
        """Return the digest that a block must have."""
        return self.table[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]


class StoredData:
    """The data files of a checkpoint, opened and checked once each."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self._records = {record.rank: record for record in manifest.files}
        self._files: dict[int, DataFile] = {}
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
                self._files[rank] = self._open(self._records[rank])
            return self._files[rank]

    def _open(self, record: FileRecord) -> DataFile:
        name = self.manifest.path_of(record)
        where = f"{self.store.url}/{name}"
        try:
            size = self.store.stat(name).size
        except ObjectNotFound as error:
            raise Corrupt(
                f"{where}: this data file is missing, though the checkpoint was committed with "
                f"it ({record.size} bytes). Restore the file or load another checkpoint"
            ) from error
        if size != record.size:
            raise Corrupt(
                f"{where}: the file has {size} bytes, expected {record.size}; it was truncated "
                "or replaced. Load another checkpoint"
            )
        header = self.store.read(name, 0, record.header_bytes)
        if digest(header).hex() != record.header_digest:
            raise Corrupt(
                f"{where}: bytes 0 to {record.header_bytes} (header) are damaged or belong to "
                "another save. Load another checkpoint"
            )
        layout = parse_header(header, where)
        if layout.save_id != self.manifest.save_id:
            raise Corrupt(f"{where}: the file belongs to the save {layout.save_id!r}, not this one")
        table = self.store.read(name, layout.table_start, record.size)
        if layout.size != record.size or digest(table).hex() != record.table_digest:
            raise Corrupt(
                f"{where}: bytes {layout.table_start} to {record.size} (checksum table) are "
                "damaged or belong to another save. Load another checkpoint"
            )
        return DataFile(name, where, layout, table)

    def entry(self, rank: int, tensor: StoredTensor, chunk: Box) -> tuple[DataFile, Entry]:
        """Return where a chunk lies; Corrupt unless its file has it with dtype and sizes."""
        file = self.file(rank, tensor.name)
        entry = file.layout.entries.get(tensor.key(chunk))
        shape = tensor.dtype.file_shape(chunk.sizes)
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, shape):
            found = "no such entry" if entry is None else f"{entry.dtype.code}{list(entry.shape)}"
            raise Corrupt(
                f"{file.where}: expected entry {tensor.key(chunk)!r} of "
                f"{tensor.dtype.code}{list(shape)}, got {found}"
            )
        return file, entry
