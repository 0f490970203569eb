"""Zip archives as ``torch.save`` writes them: where records lie, without reading them.

Records are stored as they are, after a header each, in one folder: ``data.pkl`` is the pickle,
``data/0`` and so on the memory of tensors. The directory stands at the end
(https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT).

Readers of zip archives differ in what they take of one that says two things: a name twice, a second
folder, a directory elsewhere than its end says, as where archives were put one behind the other.
torch reads other tensors then than Python would, so all of these are refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dtckpt.errors import CheckpointError, Corrupt
from dtckpt.interrupts import raised_by_signal_handler

from ....storage.base import ReadRequest, Store
from ...files.blocks import digest
from ...state.limits import check_metadata_bytes, shown
from ..files import where_of

_END_BYTES = 2048
"""Read from both ends of an archive: all there is of it besides one small tensor."""
_MARK = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s22xHH")
"""Of the header before a record: mark, and the lengths of its name and of what fills it up."""
_END_MARK, _LOCATOR_MARK, _END64_MARK = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
_END = struct.Struct("<4s4x2H2LH")
"""What closes an archive: mark, how many records (twice), size and start of the directory, and the
length of a comment."""
_LOCATOR = struct.Struct("<4s4xQ4x")
"""Before it, in archives that may be large: mark, and the place of the longer form."""
_END64 = struct.Struct("<4sQ12x4Q")
"""Mark, length of what follows, how many records (twice), size and start of the directory."""
_END64_HEAD_BYTES = 12
"""Of it, mark and length."""
_COMMENT_BYTES = 0xFFFF
_UTF8_FLAG = 0x800


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Deflated:
    """Bytes of a file that are compressed by deflate (RFC 1951)."""

    span: Span


class Archive:
    """The records of an archive that is a part of a file, or all of it."""

    def __init__(self, source: Bytes, where: str) -> None:
        self._source = source
        self.where = where
        self.size = source.size
        try:
            with zipfile.ZipFile(_Window(source)) as archive:
                found = archive.infolist()
            twofold = _ambiguity(source, found)
        except CheckpointError:
            raise
        except Exception as error:  # a directory that lies makes zipfile raise anything
            if raised_by_signal_handler(error):
                raise
            raise Corrupt(
                f"{where}: no archive of torch.save, or cut short: {shown(error)}"
            ) from error
        if twofold:
            raise Corrupt(
                f"{where}: the archive {twofold}, so that programs read different things of it; "
                "torch writes none such. Fetch the file again, or load it with the program that "
                "wrote it and save anew"
            )
        self._names = [info.filename for info in found]
        self._found = {info.filename.partition("/")[2]: info for info in found}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def size_of(self, name: str) -> int:
        """Return the length of a record, by the directory."""
        return self._info(name).file_size

    def is_deflated(self, name: str) -> bool:
        """Whether a record is compressed by deflate: torch does not, but programs that zip anew."""
        return self._info(name).compress_type == zipfile.ZIP_DEFLATED

    def crc_of(self, name: str) -> int:
        """Return the CRC-32 of a record; 0 where torch was told to compute none."""
        return self._info(name).CRC

    def spans(self, names: Sequence[str]) -> list[Span]:
        """Return the bytes of records, from the start of the archive. Their headers are read.

        Those of a record that is deflated are the compressed ones.
        """
        infos = [self._info(name) for name in names]
        last = self.size - _LOCAL.size
        for name, info in zip(names, infos, strict=True):
            if not 0 <= info.header_offset <= last:
                raise self._outside(name)
        headers = self._source.read_all(
            [(i.header_offset, i.header_offset + _LOCAL.size + len(_raw_name(i))) for i in infos]
        )
        told = zip(names, infos, headers, strict=True)
        return [self._span(name, info, header) for name, info, header in told]

    def read(self, name: str) -> bytes:
        """Return a small record; Corrupt where it has not the checksum that it was written with."""
        check_metadata_bytes(self.size_of(name), f"{self.where}: {name}")
        (span,) = self.spans([name])
        data = self._source.read(span.start, span.start + span.size)
        if self.is_deflated(name):
            data = self._inflated(name, data)
        expected = self._info(name).CRC
        if expected and zlib.crc32(data) != expected:  # none where torch was told to write none
            raise self._damaged(name)
        return data

    def _inflated(self, name: str, data: bytes) -> bytes:
        size = self.size_of(name)
        try:
            found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
        except zlib.error as error:
            raise self._damaged(name) from error
        if len(found) != size:
            raise self._damaged(name)
        return found

    def _damaged(self, name: str) -> Corrupt:
        return Corrupt(f"{self.where}: the record {name!r} is damaged. Fetch the file again")

    def fingerprint(self, name: str) -> str:
        """Return what tells a record from others: checksum and length, or a digest if it has none.

        The directory has both, so nothing is read where torch wrote checksums.
        """
        info = self._info(name)
        return f"{info.CRC:08x}{info.file_size:x}" if info.CRC else digest(self.read(name)).hex()

    def check_is_saved(self) -> None:
        """Raise CheckpointError, saying what it is, for an archive that torch.save did not make."""
        if "constants.pkl" in self and any(name.startswith("code/") for name in self._found):
            raise CheckpointError(
                f"{self.where} is a program of TorchScript, which dtckpt does not read: load it by "
                "torch.jit.load and save its state_dict() by torch.save"
            )
        if "data.pkl" in self:
            return
        if self._found and all(name.endswith(".npy") for name in self._names):
            told = (
                "arrays of numpy (.npz), which dtckpt does not read: load it with numpy.load and "
            )
            told += "save a dict of them"
        elif "archive_format" in self or "archive_version" in self:
            told = "a program of torch.export, which dtckpt does not read: load it by "
            told += "torch.export.load and save its state_dict"
        else:
            told = "a zip archive, but none of torch.save: it has no record 'data.pkl'. Unpack it "
            told += "and open what is in it"
        raise CheckpointError(f"{self.where} is {told}")

    def check_byte_order(self) -> None:
        """Raise Corrupt where numbers are of another byte order."""
        if "byteorder" in self and self.read("byteorder") != b"little":
            raise Corrupt(f"{self.where}: written in another byte order than this machine's")

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._found.get(name)
        if info is None:
            raise Corrupt(f"{self.where}: the archive has no record {name!r}")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Corrupt(
                f"{self.where}: the record {name!r} is compressed by another method than deflate. "
                "Unpack the archive and zip it again without compression (zip -0)"
            )
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise self._outside(name)
        return info

    def _outside(self, name: str) -> Corrupt:
        return Corrupt(f"{self.where}: the record {name!r} does not lie in the archive")

    def _span(self, name: str, info: zipfile.ZipInfo, header: bytes) -> Span:
        is_header = header.startswith(_MARK) and len(header) >= _LOCAL.size
        _, name_bytes, extra_bytes = _LOCAL.unpack_from(header) if is_header else (b"", 0, 0)
        start = info.header_offset + _LOCAL.size + name_bytes + extra_bytes
        if not is_header or start + info.compress_size > self.size:
            raise self._outside(name)
        if name_bytes != len(_raw_name(info)) or header[_LOCAL.size :] != _raw_name(info):
            raise Corrupt(
                f"{self.where}: the record {name!r} has another name in its header than in the "
                "directory. Fetch the file again"
            )
        return Span(start, info.compress_size)


def _raw_name(info: zipfile.ZipInfo) -> bytes:
    """Return the name of a record as the archive has it."""
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_FLAG else "cp437")


def _ambiguity(source: Bytes, found: Sequence[zipfile.ZipInfo]) -> str:
    """Return in what way an archive with these records says two things; an empty text if in none.

    Raises ValueError where it has no end.
    """
    names: set[str] = set()
    for info in found:
        # torch finds records whatever the case of their names.
        name = info.orig_filename.lower()
        if name in names:
            return f"has the record {shown(info.filename)} twice"
        if "\0" in name:
            return f"has a record of the name {shown(info.orig_filename)}"
        names.add(name)
    folders = sorted({info.filename.partition("/")[0] for info in found if "/" in info.filename})
    if len(folders) > 1:
        return f"has records in the folders {shown(folders[0])} and {shown(folders[1])}"
    counts, start, size, end = _directory(source)
    if counts != (len(found), len(found)) or start + size != end:
        return "has a directory that is not what, or where, its end says"
    return ""


def _directory(source: Bytes) -> tuple[tuple[int, int], int, int, int]:
    """Return what the end of an archive says of its directory, and where that has to end.

    That is how many records it has (twice), its start and its length; -1 records where the end says
    nothing of the bytes before it.
    """
    at = -1
    for room in (_END.size, _END_BYTES, _END.size + _COMMENT_BYTES):
        low = max(source.size - room, 0)
        tail = source.read(low, source.size)
        at = tail.rfind(_END_MARK, 0, len(tail) - _END.size + len(_END_MARK))
        if at >= 0:
            break
    if at < 0:
        raise ValueError("there is no end of a directory")
    end = low + at
    _, here, count, size, start, _ = _END.unpack_from(tail, at)
    located = source.read(end - _LOCATOR.size, end) if end >= _LOCATOR.size else b""
    if located.startswith(_LOCATOR_MARK):
        locator, (_, end) = end - _LOCATOR.size, _LOCATOR.unpack(located)
        told = source.read(end, end + _END64.size) if end + _END64.size <= locator else b""
        if not told.startswith(_END64_MARK):
            return (-1, -1), start, size, end
        _, length, here, count, size, start = _END64.unpack(told)
        if end + _END64_HEAD_BYTES + length != locator:  # it is that of an archive before this one
            return (-1, -1), start, size, end
    return (here, count), start, size, end


class Bytes(Protocol):
    """What an archive is read from."""

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of bytes."""
        ...

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return many small ranges, fetched at once."""
        ...


def local_headers(head: bytes) -> dict[str, int]:
    """Return where records begin whose headers are in the first bytes of an archive, by name."""
    starts: dict[str, int] = {}
    at = head.find(_MARK)
    while 0 <= at <= len(head) - _LOCAL.size:
        _, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
        name_start = at + _LOCAL.size
        name = head[name_start : name_start + name_bytes].decode("utf-8", "replace")
        starts.setdefault(name.partition("/")[2], name_start + name_bytes + extra_bytes)
        at = head.find(_MARK, name_start)
    return starts


@dataclass(frozen=True, slots=True)
class Memory:
    """An archive that has been read whole."""

    data: bytes

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of bytes."""
        return self.data[start:stop]

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return many ranges."""
        return [self.data[start:stop] for start, stop in ranges]


def open_archives(store: Store, name: str, spans: Sequence[Span]) -> list[Archive]:
    """Return archives that lie in one file, of which all ends are read at once."""
    ends = read_ends(store, name, spans)
    return [
        archive_of(store, name, *of) for of in zip(spans, *zip(*ends, strict=True), strict=True)
    ]


def archive_of(store: Store, name: str, span: Span, head: bytes, tail: bytes) -> Archive:
    """Return an archive in a file, of which both ends were read."""
    where = f"{where_of(store, name)} (bytes {span.start} to {span.start + span.size})"
    return Archive(_Stored(store, name, span, head, tail), where)


def read_ends(store: Store, name: str, spans: Sequence[Span]) -> list[tuple[bytes, bytes]]:
    """Return the first and the last bytes of some spans of a file, read at once."""
    ends = [bytearray(min(_END_BYTES, span.size)) for span in spans for _ in range(2)]
    requests = [
        request
        for span, head, tail in zip(spans, ends[::2], ends[1::2], strict=True)
        for request in (
            ReadRequest(span.start, head),
            ReadRequest(span.start + span.size - len(tail), tail),
        )
        if len(head)
    ]
    if requests:
        store.read_into(name, requests)
    return [(bytes(head), bytes(tail)) for head, tail in zip(ends[::2], ends[1::2], strict=True)]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A part of a file, of which both ends are known."""

    store: Store
    name: str
    span: Span
    head: bytes
    tail: bytes

    @property
    def size(self) -> int:
        return self.span.size

    def read(self, start: int, stop: int) -> bytes:
        return self.read_all([(start, stop)])[0]

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        known = [self._known(start, min(stop, self.size)) for start, stop in ranges]
        buffers = [
            bytearray(min(stop, self.size) - start) if data is None else data
            for data, (start, stop) in zip(known, ranges, strict=True)
        ]
        requests = [
            ReadRequest(self.span.start + start, data)
            for data, (start, _) in zip(buffers, ranges, strict=True)
            if isinstance(data, bytearray)
        ]
        if requests:
            self.store.read_into(self.name, requests)
        return [bytes(data) for data in buffers]

    def _known(self, start: int, stop: int) -> bytes | None:
        if stop <= len(self.head):
            return self.head[start:stop]
        tail_start = self.size - len(self.tail)
        return self.tail[start - tail_start : stop - tail_start] if start >= tail_start else None


class _Window(io.RawIOBase):
    """An archive as the file that ``zipfile`` reads its directory from."""

    def __init__(self, source: Bytes) -> None:
        super().__init__()
        self._source = source
        self._size = source.size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the start")  # as a file says it, which zipfile expects
        self._at = base + offset
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        check_metadata_bytes(stop - self._at, "the directory of an archive")
        data = self._source.read(self._at, stop) if stop > self._at else b""
        self._at += len(data)
        return data
