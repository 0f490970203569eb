"""Zip archives as ``torch.save`` writes them: where records lie, without reading them.

Records are stored as they are, after a header each, in one folder: ``data.pkl`` is the pickle,
``data/0`` and so on the memory of tensors. The directory stands at the end
(https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT).
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtckpt.errors import CheckpointError, Corrupt

from ...storage.base import ReadRequest, Store
from ..state.limits import check_metadata_bytes, shown
from .files import where_of

_END_BYTES = 2048
"""Read from both ends of an archive: all there is of it besides one small tensor."""
_LOCAL = struct.Struct("<4s22xHH")
"""Of the header before a record: mark, and the lengths of its name and of what fills it up."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    start: int
    size: int


class Archive:
    """The records of an archive that is a part of a file, or all of it."""

    def __init__(self, read: Callable[[int, int], bytes], where: str, size: int) -> None:
        self._read = read
        self.where = where
        try:
            with zipfile.ZipFile(_Window(read, size)) as archive:
                found = archive.infolist()
        except CheckpointError:
            raise
        except Exception as error:  # a directory that lies makes zipfile raise anything
            raise Corrupt(
                f"{where}: no archive of torch.save, or cut short: {shown(error)}"
            ) from error
        self._found = {info.filename.partition("/")[2]: info for info in found}
        self.size = size

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def span(self, name: str) -> Span:
        """Return the bytes of a record, from the start of the archive."""
        info = self._found.get(name)
        if info is None:
            raise Corrupt(f"{self.where}: the archive has no record {name!r}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise Corrupt(
                f"{self.where}: the record {name!r} is compressed, as torch never does it"
            )
        at = info.header_offset
        header = self._read(at, at + _LOCAL.size) if 0 <= at <= self.size - _LOCAL.size else b""
        is_header = header.startswith(b"PK\x03\x04")
        _, name_bytes, extra_bytes = _LOCAL.unpack(header) if is_header else (b"", 0, 0)
        start = at + _LOCAL.size + name_bytes + extra_bytes
        if not is_header or start + info.file_size > self.size:
            raise Corrupt(f"{self.where}: the record {name!r} does not lie in the archive")
        return Span(start, info.file_size)

    def read(self, name: str) -> bytes:
        """Return a small record."""
        span = self.span(name)
        check_metadata_bytes(span.size, f"{self.where}: {name}")
        return self._read(span.start, span.start + span.size)

    def check_byte_order(self) -> None:
        """Raise Corrupt where numbers are of another byte order."""
        if "byteorder" in self and self.read("byteorder") != b"little":
            raise Corrupt(f"{self.where}: written in another byte order than this machine's")


def open_archives(store: Store, name: str, spans: Sequence[Span]) -> list[Archive]:
    """Return archives that lie in one file, of which all ends are read at once."""
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
    return [
        Archive(
            _reader(store, name, span, bytes(head), bytes(tail)),
            f"{where_of(store, name)} (bytes {span.start} to {span.start + span.size})",
            span.size,
        )
        for span, head, tail in zip(spans, ends[::2], ends[1::2], strict=True)
    ]


def _reader(
    store: Store, name: str, span: Span, head: bytes, tail: bytes
) -> Callable[[int, int], bytes]:
    tail_start = span.size - len(tail)

    def read(start: int, stop: int) -> bytes:
        stop = min(stop, span.size)
        if stop <= len(head):
            return head[start:stop]
        if start >= tail_start:
            return tail[start - tail_start : stop - tail_start]
        return store.read(name, span.start + start, span.start + stop)

    return read


class _Window(io.RawIOBase):
    """An archive as the file that ``zipfile`` reads its directory from."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._range = read
        self._size = size
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
        data = self._range(self._at, stop) if stop > self._at else b""
        self._at += len(data)
        return data
