"""Files of which some bytes are not as they are read: compressed, or not in the file at all.

Such pieces have addresses behind the end of the file, where plans and reads find them as any other
bytes. A compressed piece is decompressed from its start as far as it is wanted, and no further;
whoever reads on from where another read has stopped goes on there.
"""

from __future__ import annotations

import io
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zstandard

from dtckpt.errors import Corrupt

from ....storage.base import ReadRequest, Store
from ....storage.one_file import OneFile
from ...state.limits import check_metadata_bytes, shown
from ..files import where_of
from .archive import Deflated, Span

_GAP = 1 << 20
"""Between pieces, so that no read takes one for the neighbour of another."""
_FETCH_BYTES = 1 << 20
_WINDOW_BYTES = 32 << 20
"""What a frame may refer back to, all of which is kept; torch's compressor takes 2 MiB."""
_IDLE = 8
"""Decompressors that wait to go on: as many as read at once, and some more."""


class UnpackedFile(OneFile):
    """A file with pieces behind its end that are made when they are read."""

    def __init__(self, around: Store, name: str, size: int) -> None:
        super().__init__(around, name)
        self.url = where_of(around, name)
        self.size = size
        self._starts: list[int] = []
        self._pieces: list[Span | Deflated | bytes] = []
        self._sizes: list[int] = []
        self._idle: OrderedDict[_Decompressor, None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def has_pieces(self) -> bool:
        """Whether there is anything but the file."""
        return bool(self._pieces)

    def add(self, piece: Span | Deflated | bytes, size: int) -> int:
        """Return the address of a piece of ``size`` bytes.

        Some given ones, or what is compressed in the file: a zstd stream, if nothing else is said.
        """
        last = self._starts[-1] + self._sizes[-1] if self._starts else self.size
        self._starts.append(last + _GAP)
        self._pieces.append(piece)
        self._sizes.append(size)
        return self._starts[-1]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of the file, or of a piece."""
        if stop is None or stop <= self.size:
            return super().read(name, start, stop)
        data = bytearray(stop - start)
        self.read_into(name, [ReadRequest(start, data)])
        return bytes(data)

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        """Fill every buffer; what lies between pieces is left as it is."""
        inside = [
            request
            if request.stop <= self.size
            else ReadRequest(request.offset, request.view[: self.size - request.offset])
            for request in requests
            if request.offset < self.size
        ]
        if inside:
            super().read_into(name, inside)
        for request in requests:
            if request.stop > self.size:
                self._fill(request)

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        """Fill every buffer."""
        self.read_into(name, requests)
        yield from requests

    def _fill(self, request: ReadRequest) -> None:
        first = max(bisect_right(self._starts, request.offset) - 1, 0)
        for i in range(first, len(self._starts)):
            start, size = self._starts[i], self._sizes[i]
            low, high = max(start, request.offset), min(start + size, request.stop)
            if start >= request.stop:
                return
            if low < high:
                into = request.view[low - request.offset : high - request.offset]
                self._copy(self._pieces[i], low - start, into)

    def _copy(self, piece: Span | Deflated | bytes, start: int, into: memoryview) -> None:
        if isinstance(piece, bytes):
            into[:] = piece[start : start + len(into)]
            return
        stream = self._take(piece, start)
        stream.read_into(start, into)
        with self._lock:
            self._idle[stream] = None
            while len(self._idle) > _IDLE:
                self._idle.popitem(last=False)

    def _take(self, piece: Span | Deflated, start: int) -> _Decompressor:
        """Return the decompressor that has come closest to a byte of a piece, or a new one."""
        with self._lock:
            near = [s for s in self._idle if s.piece == piece and s.position <= start]
            if near:
                found = max(near, key=lambda stream: stream.position)
                del self._idle[found]
                return found
        return _Decompressor(self.around, self.name, piece)


def unpack(store: Store, name: str, piece: Span) -> bytes:
    """Return what a small compressed piece holds; CheckpointError where it is not small."""
    stream = _Decompressor(store, name, piece)
    parts: list[bytes] = []
    while part := stream.read(_FETCH_BYTES):
        parts.append(part)
        check_metadata_bytes(stream.position, stream.where)
    return b"".join(parts)


def unpack_head(store: Store, name: str, piece: Span, size: int) -> bytes:
    """Return the first bytes that a compressed piece holds, ``size`` if there are as many."""
    return _Decompressor(store, name, piece).read(size)


class _Decompressor:
    """What is compressed in a file, from its start on."""

    def __init__(self, store: Store, name: str, piece: Span | Deflated) -> None:
        self.piece = piece
        self.position = 0
        span = piece.span if isinstance(piece, Deflated) else piece
        self.where = f"{where_of(store, name)} (bytes {span.start} to {span.start + span.size})"
        source: Any = _Source(lambda start, stop: store.read(name, start, stop), span)
        if isinstance(piece, Deflated):
            self._stream: Any = _Inflating(source)
            return
        made = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        self._stream = made.stream_reader(source, read_size=_FETCH_BYTES, read_across_frames=True)

    def read(self, size: int) -> bytes:
        """Return the next bytes; fewer at the end only."""
        data = bytearray(size)
        return bytes(data[: self._next(memoryview(data))])

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill a buffer from a byte on that is not before the position."""
        scratch = memoryview(bytearray(min(_FETCH_BYTES, start - self.position)))
        while self.position < start:
            self._fill(scratch[: start - self.position])
        self._fill(into)

    def _fill(self, into: memoryview) -> None:
        if self._next(into) < len(into):
            raise Corrupt(
                f"{self.where}: what is compressed there ends after {self.position} bytes, more "
                "are expected. Fetch the file again"
            )

    def _next(self, into: memoryview) -> int:
        done = 0
        try:
            while done < len(into) and (count := self._stream.readinto(into[done:])):
                done += count
        except (zstandard.ZstdError, zlib.error) as error:
            raise Corrupt(f"{self.where}: damaged compressed bytes: {shown(error)}") from error
        self.position += done
        return done


class _Inflating:
    """Decompresses deflate as far as it is asked."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._waiting = b""
        """Compressed bytes that were fetched, and are not needed yet."""

    def readinto(self, into: memoryview) -> int:
        """Fill the start of a buffer, and return how much; 0 at the end."""
        while not self._inflater.eof:
            given = self._waiting or self._source.read(_FETCH_BYTES)
            found = self._inflater.decompress(given, len(into))
            self._waiting = self._inflater.unconsumed_tail
            if found:
                into[: len(found)] = found
                return len(found)
            if not given:
                return 0
        return 0


class _Source(io.RawIOBase):
    """The compressed bytes."""

    def __init__(self, read: Callable[[int, int], bytes], piece: Span) -> None:
        super().__init__()
        self._range = read
        self._at = piece.start
        self._end = piece.start + piece.size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        stop = self._end if size < 0 else min(self._at + size, self._end)
        data = self._range(self._at, stop) if stop > self._at else b""
        self._at = stop
        return data
