"""Files of ranks, opened: what each has of an item of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....storage.base import ObjectInfo, Store
from ...files.manifest import FileRecord, Place
from ..archives.memories import Memory, SafetensorsMemory
from ..archives.saved import open_saved
from ..files import info_of_file, record_of, where_of
from ..names import SAFETENSORS
from ..pickles.unpickling import TensorNote
from ..safetensors import read_header
from .names import RankFile
from .notes import KnownNames
from .torch_checkpointing import with_layouts

_NUM_READERS = 16
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Opened:
    """A file of a rank, with the notes of its tensors."""

    file: RankFile
    number: int
    """Among all files, which stands for its rank in layouts."""
    store: Store
    seen: ObjectInfo
    """What was told of it before it was read."""
    memory: Memory
    value: Any
    digest: str
    places: list[Place]
    """Of the chunks that are to be read from it."""

    @property
    def where(self) -> str:
        """How messages call it."""
        return where_of(self.store, self.file.name)

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of the file."""
        return self.store.read(self.file.name, start, start + size)

    def record(self) -> FileRecord:
        """Return what the manifest has of it."""
        return record_of(self.number, self.seen, self.places, digest=self.digest)

    def place(self, key: str, note: TensorNote) -> None:
        """Note where the chunk of a key lies; Corrupt where the file does not have all of it."""
        self.places.append(self.memory.place(key, note, f"{self.where}, {key!r}"))


def open_all(store: Store, files: Sequence[RankFile]) -> list[Opened]:
    """Return all files, opened side by side; Corrupt where one is missing or damaged."""
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="dtckpt-headers") as pool:
        return list(pool.map(partial(_open, store), files, range(len(files))))


def _open(store: Store, file: RankFile, number: int) -> Opened:
    where = where_of(store, file.name)
    if file.name.endswith(SAFETENSORS):
        seen = info_of_file(store, file.name)
        header = read_header(store, file.name, number, end=seen.size)
        memory: Memory = SafetensorsMemory(header)
        value: Any = SafetensorsMemory(header).notes()
        told = header.record.header_digest
    else:
        saved = open_saved(store, file.name, where, KnownNames())
        seen, memory, value, told = saved.seen, saved.memory, saved.value, saved.digest
    return Opened(
        file=file,
        number=number,
        store=store,
        seen=seen,
        memory=memory,
        value=with_layouts(value, file, where),
        digest=told,
        places=[],
    )


def are_equal(notes: Mapping[Opened, TensorNote]) -> bool:
    """Whether plain tensors of several files are equal, as parts of equal memory.

    Archives have checksums of it; where there are none, it is read and compared.
    """
    (first, note), *others = notes.items()
    return all(_are_equal(first, note, other, also) for other, also in others)


def _are_equal(one: Opened, note: TensorNote, other: Opened, also: TensorNote) -> bool:
    if note._replace(storage=also.storage) != also:
        return False
    sums = one.memory.checksum(note), other.memory.checksum(also)
    if all(sums):
        return sums[0] == sums[1]
    mine, theirs = one.memory.span(note), other.memory.span(also)
    return mine.size == theirs.size and all(
        one.read(mine.start + at, stop - at) == other.read(theirs.start + at, stop - at)
        for at in range(0, mine.size, _PIECE_BYTES)
        for stop in (min(at + _PIECE_BYTES, mine.size),)
    )
