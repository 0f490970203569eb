"""Data files of a checkpoint that is written anew from another one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtckpt.errors import Corrupt, ObjectNotFound

from ...storage.base import ReadRequest, Store
from ..files.blocks import digest
from ..files.committing import discard
from ..files.datafile import lay_out
from ..files.manifest import FileRecord, data_path
from ..files.stored_data import StoredData, open_data_file
from ..files.stored_tensor import StoredTensor
from ..files.writing import Chunk, Contents, in_file_order, write_file
from ..reading.batches import BatchedReader
from ..reading.whole_files import stretches
from ..tensors.dtypes import DType
from ..tensors.source import Source

OnRead = Callable[[int], None]


@dataclass(slots=True)
class Rewriting:
    """Writes what the writers of some tensors hold, as it is read."""

    data: StoredData
    reader: BatchedReader
    target: Store
    is_compressed: bool = False
    save_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def write_all(self, tensors: Sequence[StoredTensor]) -> list[FileRecord]:
        """Write all files; nothing is left of them after an error."""
        ranks = sorted({rank for tensor in tensors for rank, _ in tensor.chunks()})
        try:
            found = [self.write(tensors, rank) for rank in ranks]
            self.data.check_unchanged()
        except BaseException:
            for rank in ranks:
                discard(self.target, self.save_id, rank)
            raise
        return [record for record in found if record is not None]

    def write(self, tensors: Sequence[StoredTensor], rank: int) -> FileRecord | None:
        """Write the file of a rank; None where it has nothing."""
        return write_file(
            self.target,
            Contents(self.chunks(tensors, rank)),
            save_id=self.save_id,
            rank=rank,
            is_compressed=self.is_compressed,
        )

    def find(self, tensors: Sequence[StoredTensor], rank: int) -> FileRecord | None:
        """Return the file of a rank that is there, whole, from before; every byte is verified.

        One that is there and not whole is taken away.
        """
        name = data_path(self.save_id, rank, is_compressed=self.is_compressed)
        try:
            size = self.target.stat(name).size
        except ObjectNotFound:
            return None
        record = self._whole(tensors, rank, name, size)
        if record is None:
            self.target.delete([name])
        return record

    def _whole(
        self, tensors: Sequence[StoredTensor], rank: int, name: str, size: int
    ) -> FileRecord | None:
        chunks = in_file_order(self.chunks(tensors, rank))
        layout, header = lay_out(
            ((chunk.key, chunk.dtype, chunk.box.sizes) for chunk in chunks),
            save_id=self.save_id,
            is_compressed=self.is_compressed,
        )
        region = size - layout.data_start - layout.table_bytes
        if region < 0 or (region != layout.data_bytes and not self.is_compressed):
            return None
        there = memoryview(bytearray(len(header)))
        table = memoryview(bytearray(layout.table_bytes))
        requests = [ReadRequest(0, there), ReadRequest(size - len(table), table)]
        self.target.read_into(name, requests)
        if bytes(there) != header:
            return None
        record = FileRecord(
            rank=rank,
            size=size,
            header_bytes=layout.data_start,
            data_bytes=layout.data_bytes,
            stored_bytes=region if self.is_compressed else None,
            header_digest=digest(header).hex(),
            table_digest=digest(table).hex(),
        )
        try:
            file = open_data_file(self.target, record, self.save_id)
            is_whole = not any(s.damaged for s in stretches(file, file.layout.entries.values()))
        except Corrupt:
            return None
        return record if is_whole else None

    def chunks(self, tensors: Sequence[StoredTensor], rank: int) -> list[Chunk]:
        """Return a rank's chunks in file order; small ones are read together in batches."""
        found = [(tensor, box) for tensor in tensors for box in tensor.chunks_of(rank)]
        found.sort(key=lambda item: -item[0].dtype.itemsize)
        sources = self.reader.sources([(tensor.name, box) for tensor, box in found])
        return [
            Chunk(tensor=tensor, box=box, source=self._as(tensor.dtype, tensor.name, source))
            for (tensor, box), source in zip(found, sources, strict=True)
        ]

    def _as(self, dtype: DType, name: str, source: Source) -> Source:
        saved = self.data.manifest.tensors[name].dtype
        return source if saved == dtype else _Converted(source, saved, dtype)


@dataclass(frozen=True, slots=True)
class _Converted:
    """The elements of a source in another dtype."""

    source: Source
    saved: DType
    wanted: DType

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        from ..loading.casting import CONVERTED_BYTES, converted, torch_dtype  # which needs torch

        saved, wanted = torch_dtype(self.saved), torch_dtype(self.wanted)
        widest = max(self.saved.itemsize, self.wanted.itemsize)
        step = max(min(CONVERTED_BYTES, max_bytes) // widest, 1)
        for piece in self.source.pieces(max_bytes):
            items = np.frombuffer(piece, dtype=self.saved.items)
            for start in range(0, len(items), step):
                made = converted(items[start : start + step], saved, wanted)
                yield made.view(np.uint8).data
