"""Writing one rank's data file: bytes in, checksums in the same pass, one stream out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..dtensor.box import Box
from ..storage.base import Store, WriteStream
from .blocks import DEFAULT_BLOCK_BYTES, BlockHasher, digest
from .datafile import lay_out
from .dtypes import DType
from .manifest import FileRecord, data_path
from .plan import StoredTensor

PIECE_BYTES = 16 << 20
"""Most bytes that a source hands over at once, which bounds the memory of a save."""
_SMALL_BYTES = 1 << 18


class Source(Protocol):
    """Where the bytes of one chunk come from."""

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the chunk's bytes in row-major order, at most ``max_bytes`` at a time.

        A piece is one-dimensional, of single bytes, and may be reused once the next is asked for.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor that is to be written, and where its bytes are."""

    tensor: StoredTensor
    box: Box
    source: Source

    @property
    def key(self) -> str:
        """Key in the data file."""
        return self.tensor.key(self.box)

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.tensor.dtype


def write_file(
    store: Store,
    chunks: Iterable[Chunk],
    *,
    save_id: str,
    rank: int,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
) -> FileRecord | None:
    """Write all chunks of a rank as one durable data file; None where there is no chunk.

    Raises what the store raises; nothing is visible under the file's name then.
    """
    by_key = {chunk.key: chunk for chunk in chunks}
    if not by_key:
        return None
    layout, header = lay_out(
        ((c.key, c.dtype, c.box.sizes) for c in by_key.values()),
        save_id=save_id,
        block_bytes=block_bytes,
    )
    with store.create(data_path(save_id, rank), layout.size) as stream:
        stream.write(header)
        out = _HashingStream(stream, block_bytes)
        for key in layout.entries:
            for piece in by_key[key].source.pieces(PIECE_BYTES):
                out.write(piece)
        table = out.finish()
        stream.write(table)
    return FileRecord(
        rank=rank,
        size=layout.size,
        header_bytes=layout.data_start,
        header_digest=digest(header).hex(),
        table_digest=digest(table).hex(),
    )


class _HashingStream:
    """Hashes bytes on their way to a stream; small pieces are gathered into larger writes."""

    def __init__(self, stream: WriteStream, block_bytes: int) -> None:
        self._stream = stream
        self._hasher = BlockHasher(block_bytes)
        self._small = bytearray()

    def write(self, piece: memoryview) -> None:
        if len(piece) < _SMALL_BYTES:
            self._small += piece
            if len(self._small) >= _SMALL_BYTES:
                self._flush()
            return
        self._flush()
        self._put(piece)

    def _flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._put(memoryview(small))

    def _put(self, data: memoryview) -> None:
        self._hasher.update(data)
        self._stream.write(data)

    def finish(self) -> bytes:
        self._flush()
        return self._hasher.table()
