"""Where the tensors of a file of a rank are: in an archive of ``torch.save``, or safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dtckpt.errors import Corrupt

from ....dtensor.geometry.box import row_major_strides
from ...files.manifest import Place
from ..files import reach_bytes
from ..pickles.unpickling import Storage, TensorNote
from ..safetensors import Header
from .archive import Archive, Span
from .forms import AS_IT_IS


class Memory(Protocol):
    """The tensors of a file, by notes of them."""

    def place(self, key: str, note: TensorNote, where: str) -> Place:
        """Return where a chunk lies; Corrupt where the file does not have all of it."""
        ...

    def checksum(self, note: TensorNote) -> int:
        """Return a checksum of all the memory that a tensor is of; 0 where there is none."""
        ...

    def span(self, note: TensorNote) -> Span:
        """Return the bytes of all the memory that a tensor is of."""
        ...


@dataclass(frozen=True, slots=True)
class ArchiveMemory:
    """Records of an archive."""

    archive: Archive

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.archive.size

    def place(self, key: str, note: TensorNote, where: str) -> Place:
        """Return where a chunk lies; Corrupt where the file does not have all of it."""
        itemsize = note.dtype(where).itemsize
        record, skip = f"data/{note.storage.key}", note.start * itemsize
        strides, room = note.byte_strides(itemsize), self.archive.size_of(record)
        if skip + reach_bytes(note.shape, strides, itemsize) > room:
            raise Corrupt(
                f"{where}: a tensor of shape {note.shape} and strides {note.strides} from element "
                f"{note.start} on does not lie in its memory of {room} bytes"
            )
        return Place(key, 0, self.size, record, skip, strides)

    def checksum(self, note: TensorNote) -> int:
        """Return the CRC-32 of a record, which torch may have been told to leave out."""
        return self.archive.crc_of(f"data/{note.storage.key}")

    def span(self, note: TensorNote) -> Span:
        """Return the bytes of a record; its header is read."""
        return self.archive.spans([f"data/{note.storage.key}"])[0]


@dataclass(frozen=True, slots=True)
class SafetensorsMemory:
    """Entries of a safetensors file."""

    header: Header

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.header.record.size

    def notes(self) -> dict[str, TensorNote]:
        """Return the note of each entry."""
        notes: dict[str, TensorNote] = {}
        for name, entry in self.header.entries.items():
            shape, dtype = entry.dtype.shape_of(entry.shape), entry.dtype.torch_name
            strides = row_major_strides(shape)
            notes[name] = TensorNote(Storage(name, dtype), 0, shape, strides, dtype)
        return notes

    def place(self, key: str, note: TensorNote, where: str) -> Place:
        """Return where a chunk lies: in the bytes of its entry."""
        itemsize = note.dtype(where).itemsize
        span, skip = self.span(note), note.start * itemsize
        strides = note.byte_strides(itemsize)
        return Place(key, span.start + skip, span.size - skip, "", 0, strides, AS_IT_IS)

    def checksum(self, note: TensorNote) -> int:
        """Return 0: there are none."""
        return 0

    def span(self, note: TensorNote) -> Span:
        """Return the bytes of an entry."""
        entry = self.header.entries[note.storage.key]
        return Span(self.header.data_start + entry.start, entry.num_bytes)
