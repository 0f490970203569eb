"""Files of archives, opened: which bytes are the elements of each chunk.

Some chunks are compressed, lie in a safetensors file within the file, or are told in the place of
the chunk itself; which one, ``Place.form`` says.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dtckpt.errors import Corrupt

from ....dtensor.geometry.box import Box
from ....storage.base import Store
from ...files.datafile import Entry
from ...files.manifest import FileRecord, Manifest, Place
from ...files.stored_data import DataFile, SummedRecord, check_size
from ...state.limits import shown
from ...tensors.dtypes import DType
from .. import safetensors
from ..files import data_file, reach_bytes, where_of
from ..pickles.unpickling import TensorNote, load_pickle
from .archive import Archive, Deflated, Memory, Span, local_headers, open_archives
from .forms import AS_IT_IS, IN_SAFETENSORS, INLINE, ZSTD
from .legacy import check_fingerprint
from .unpacked import UnpackedFile, unpack, unpack_head

_HEAD_BYTES = 64 << 10
"""Of a compressed archive: its pickle, and the headers before the elements of a tensor."""


def open_file(store: Store, manifest: Manifest, record: FileRecord) -> DataFile:
    """Return a file of archives, of which the headers are read; Corrupt where one is no such."""
    name = manifest.path_of(record)
    seen = check_size(store, name, record.size)
    file = UnpackedFile(store, name, record.size)
    if record.table_digest.startswith("legacy:"):
        check_fingerprint(store, name, record.table_digest)
    elif record.table_digest:  # of a file that is one archive: that of its pickle
        (archive,) = open_archives(store, name, [Span(0, record.size)])
        if archive.fingerprint("data.pkl") != record.table_digest:
            where = where_of(store, name)
            raise Corrupt(f"{where}: the file was replaced while it was read. Load it anew")
    by_form: dict[str, list[_Chunk]] = defaultdict(list)
    for place in record.places:
        by_form[place.form].append(_chunk(manifest, place, where_of(store, name)))
    entries: dict[str, Entry] = {}
    records: dict[_Record, list[str]] = defaultdict(list)
    for form, chunks in by_form.items():
        for chunk, at in zip(chunks, _FINDERS[form](file, chunks), strict=True):
            entries[chunk.place.key] = chunk.entry(at)
            if at.record is not None:
                records[at.record].append(chunk.place.key)
    ordered = dict(sorted(entries.items(), key=lambda item: item[1].start))
    summed = [SummedRecord(*found, tuple(keys)) for found, keys in sorted(records.items())]
    return data_file(file if file.has_pieces else store, seen, record, ordered, summed)


_Record = tuple[int, int, int]
"""Where a record of an archive begins in the file, its length, and its CRC-32."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the elements of a chunk are."""

    start: int
    """First byte in the file, or behind its end."""
    strides: tuple[int, ...] | None
    room: int
    """Bytes from there on that may be elements."""
    record: _Record | None = None
    """The record of an archive that they are in, if it has a checksum."""

    def moved(self, by: int) -> _Found:
        """Return the same in a file in which what they are in begins later."""
        record = self.record and (by + self.record[0], *self.record[1:])
        return replace(self, start=by + self.start, record=record)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk that is to be found."""

    place: Place
    dtype: DType
    box: Box
    where: str

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.box.sizes

    @property
    def span(self) -> Span:
        return Span(self.place.start, self.place.size)

    def entry(self, at: _Found) -> Entry:
        """Return the entry; Corrupt where the elements do not lie where they were found."""
        key, num_bytes = self.place.key, self.num_bytes(at.strides)
        if num_bytes > at.room:
            raise Corrupt(
                f"{self.where}, {key!r}: {num_bytes} bytes of elements begin at byte {at.start}, "
                f"and end there after {max(at.room, 0)}. Fetch the file again"
            )
        shape = self.dtype.file_shape(self.sizes)
        return Entry(key, self.dtype.in_file, shape, at.start, num_bytes, 0, at.strides)

    def num_bytes(self, strides: tuple[int, ...] | None) -> int:
        return reach_bytes(self.sizes, strides, self.dtype.itemsize)

    def place_in(self, pickled: bytes, where: str) -> Place:
        """Return the place with a record: that of the tensor of which the archive is, if none."""
        if self.place.record:
            return self.place
        where = f"{where}, {self.place.key!r}"
        note = load_pickle(pickled, where)
        if not isinstance(note, TensorNote) or (note.shape, note.dtype(where)) != (
            self.sizes,
            self.dtype,
        ):
            raise Corrupt(
                f"{where}: expected a {self.dtype.torch_name} tensor of shape {self.sizes}, got "
                f"{shown(note)}"
            )
        itemsize = self.dtype.itemsize
        return self.place._replace(
            record=f"data/{note.storage.key}",
            skip=note.start * itemsize,
            strides=note.byte_strides(itemsize),
        )


def _chunk(manifest: Manifest, place: Place, where: str) -> _Chunk:
    key, _, box = place.key.partition("[")
    tensor = manifest.tensors[key]
    whole = Box.whole(tensor.shape)
    return _Chunk(place, tensor.dtype, Box.parse("[" + box) if box else whole, where)


def _in_archives(file: UnpackedFile, chunks: Sequence[_Chunk]) -> list[_Found]:
    spans = list(dict.fromkeys(chunk.span for chunk in chunks))
    archives = dict(zip(spans, open_archives(file, file.name, spans), strict=True))
    by_span: dict[Span, list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_span[chunk.span].append(chunk)
    found: dict[str, _Found] = {}
    for span, some in by_span.items():
        at = _in_archive(archives[span], some, partial(_inflated, file, span.start, {}))
        for chunk, place in zip(some, at, strict=True):
            found[chunk.place.key] = place.moved(span.start)
    return [found[chunk.place.key] for chunk in chunks]


def _inflated(
    file: UnpackedFile, start: int, added: dict[Span, int], record: Span, size: int
) -> int:
    """Return where a deflated record of an archive that begins at ``start`` is made."""
    if record not in added:
        piece = Deflated(Span(start + record.start, record.size))
        added[record] = file.add(piece, size) - start
    return added[record]


def _in_archive(
    archive: Archive, chunks: Sequence[_Chunk], inflated: Callable[[Span, int], int]
) -> list[_Found]:
    """Return where in an archive some chunks are; ``inflated`` says it of a deflated record."""
    archive.check_byte_order()
    pickled = b"" if all(chunk.place.record for chunk in chunks) else archive.read("data.pkl")
    places = [chunk.place_in(pickled, archive.where) for chunk in chunks]
    spans = archive.spans([place.record for place in places])
    found: list[_Found] = []
    for place, span in zip(places, spans, strict=True):
        crc, size, start = archive.crc_of(place.record), archive.size_of(place.record), span.start
        if archive.is_deflated(place.record):
            start = inflated(span, size)
        record = (start, size, crc) if crc else None
        found.append(_Found(start + place.skip, place.strides, size - place.skip, record))
    return found


def _in_compressed(file: UnpackedFile, chunks: Sequence[_Chunk]) -> list[_Found]:
    return [_in_compressed_archive(file, chunk) for chunk in chunks]


def _in_compressed_archive(file: UnpackedFile, chunk: _Chunk) -> _Found:
    """Return where a chunk is, having decompressed no more than the headers before it.

    Of one of several tensors in a value all is decompressed, since the directory is at the end.
    """
    if chunk.place.record:
        archive = open_compressed(file, file.name, chunk.span)
        (at,) = _in_archive(archive, [chunk], partial(_compressed_twice, archive))
        return _Found(file.add(chunk.span, archive.size) + at.start, at.strides, at.room)
    head = unpack_head(file, file.name, chunk.span, _HEAD_BYTES)
    where = f"{chunk.where} (bytes {chunk.span.start} to {chunk.span.start + chunk.span.size})"
    starts = local_headers(head)
    if "data.pkl" not in starts or not head.startswith(b"little", starts.get("byteorder", -1)):
        raise Corrupt(f"{where}: no archive of torch.save of this byte order is compressed there")
    place = chunk.place_in(head[starts["data.pkl"] :], where)
    if place.record not in starts:
        raise Corrupt(f"{where}: the archive has no record {place.record!r}")
    start, num_bytes = starts[place.record] + place.skip, chunk.num_bytes(place.strides)
    return _Found(file.add(chunk.span, start + num_bytes) + start, place.strides, num_bytes)


def _compressed_twice(archive: Archive, record: Span, _size: int) -> int:
    raise Corrupt(
        f"{archive.where}: bytes {record.start} to {record.start + record.size} of the archive are "
        "compressed within what is compressed. Unpack it and save it anew"
    )


def open_compressed(store: Store, name: str, span: Span) -> Archive:
    """Return a small archive that is compressed; CheckpointError where it is not small."""
    where = f"{where_of(store, name)} (bytes {span.start} to {span.start + span.size})"
    return Archive(Memory(unpack(store, name, span)), where)


def _in_safetensors(file: UnpackedFile, chunks: Sequence[_Chunk]) -> list[_Found]:
    """Return where chunks are in safetensors files that lie behind values."""
    headers = {
        start: safetensors.read_header(file, file.name, 0, start=start, end=file.size)
        for start in {chunk.place.start for chunk in chunks}
    }
    found: list[_Found] = []
    for chunk in chunks:
        name, header = chunk.place.record, headers[chunk.place.start]
        entry, box = header.entries.get(name), header.boxes.get(name)
        told = (None if entry is None else entry.dtype, box)
        if entry is None or told != (chunk.dtype, chunk.box):
            raise Corrupt(
                f"{chunk.where}: expected {chunk.dtype.code}{chunk.box} of {name!r}, got "
                f"{shown(told)}; torch writes one part only of a tensor into such a file"
            )
        found.append(_Found(header.data_start + entry.start, None, entry.num_bytes))
    return found


def _inline(file: UnpackedFile, chunks: Sequence[_Chunk]) -> list[_Found]:
    found: list[_Found] = []
    for chunk in chunks:
        data = base64.b64decode(chunk.place.record)
        found.append(_Found(file.add(data, len(data)), chunk.place.strides, len(data)))
    return found


def _as_it_is(_: UnpackedFile, chunks: Sequence[_Chunk]) -> list[_Found]:
    places = [chunk.place for chunk in chunks]
    return [_Found(place.start, place.strides, place.size) for place in places]


_FINDERS: dict[str, Callable[[UnpackedFile, Sequence[_Chunk]], list[_Found]]] = {
    "": _in_archives,
    ZSTD: _in_compressed,
    IN_SAFETENSORS: _in_safetensors,
    INLINE: _inline,
    AS_IT_IS: _as_it_is,
}
"""What finds the chunks of a form."""
