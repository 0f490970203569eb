"""Data files: valid safetensors files that carry the checksums of their own blocks.

::

    bytes 0-7         length N of the header, little endian
    bytes 8 - 8+N     JSON header, padded with spaces so that the data starts on a 4 KiB boundary
    data region       chunks back to back, wide dtypes first so that each is aligned to its items
    checksum table    xxh3_128 of every block of the data region, as the last entry of the header

docs/format.md describes the format for implementers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from dtckpt.errors import Corrupt

from .blocks import DEFAULT_BLOCK_BYTES, DIGEST_BYTES, num_blocks
from .dtypes import DType, dtype_of_code

ALIGNMENT = 4096
TABLE_KEY = "__dtckpt_blocks__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One chunk of a data file."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    """Shape as the header states it, in values."""
    start: int
    """First byte, counted from the start of the data region."""

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) // self.dtype.packed * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """Where everything lies in a data file."""

    save_id: str
    block_bytes: int
    data_start: int
    """Offset of the data region in the file; also the number of header bytes."""
    data_bytes: int
    """Length of the data region."""
    entries: dict[str, Entry]

    def keys_between(self, start: int, end: int) -> list[str]:
        """Return the keys of entries with bytes in a range of the data region."""
        return [
            entry.key
            for entry in self.entries.values()
            if entry.num_bytes and entry.start < end and entry.start + entry.num_bytes > start
        ]

    @property
    def table_start(self) -> int:
        """Offset of the checksum table in the file."""
        return self.data_start + self.data_bytes

    @property
    def table_bytes(self) -> int:
        """Length of the checksum table."""
        return DIGEST_BYTES * num_blocks(self.data_bytes, self.block_bytes)

    @property
    def size(self) -> int:
        """Length of the file."""
        return self.table_start + self.table_bytes


def lay_out(
    chunks: Iterable[tuple[str, DType, tuple[int, ...]]],
    *,
    save_id: str,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
) -> tuple[FileLayout, bytes]:
    """Return the layout and the header bytes of a file of (key, dtype, shape) chunks.

    Wide dtypes come first and keep their given order otherwise.
    """
    entries: dict[str, Entry] = {}
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "dtckpt_version": "1",
            "dtckpt_save_id": save_id,
            "dtckpt_block_bytes": str(block_bytes),
        }
    }
    start = 0
    for key, dtype, shape in sorted(chunks, key=lambda chunk: -chunk[1].itemsize):
        entry = Entry(key=key, dtype=dtype, shape=dtype.file_shape(shape), start=start)
        start += entry.num_bytes
        entries[key] = entry
        header[key] = {
            "dtype": dtype.code,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, start],
        }
    blocks = num_blocks(start, block_bytes)
    header[TABLE_KEY] = {
        "dtype": "U8",
        "shape": [blocks, DIGEST_BYTES],
        "data_offsets": [start, start + blocks * DIGEST_BYTES],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    layout = FileLayout(
        save_id=save_id,
        block_bytes=block_bytes,
        data_start=8 + len(text),
        data_bytes=start,
        entries=entries,
    )
    return layout, len(text).to_bytes(8, "little") + text


def parse_header(data: bytes, where: str) -> FileLayout:
    """Return the layout that a header describes; Corrupt, naming ``where``, if it is malformed."""
    length = int.from_bytes(data[:8], "little")
    if length != len(data) - 8:
        raise Corrupt(f"{where}: the header has {len(data) - 8} bytes, its length says {length}")
    try:
        header = cast(dict[str, Any], json.loads(data[8:]))
        metadata = header.pop("__metadata__")
        table = header.pop(TABLE_KEY)
        _check_metadata(metadata, where)
        entries = {key: _entry(key, value, where) for key, value in header.items()}
        layout = FileLayout(
            save_id=metadata["dtckpt_save_id"],
            block_bytes=int(metadata["dtckpt_block_bytes"]),
            data_start=len(data),
            data_bytes=sum(entry.num_bytes for entry in entries.values()),
            entries=entries,
        )
        _check_cover(layout, table["data_offsets"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{where}: malformed header of {len(data)} bytes: {error!r}") from error
    return layout


def _check_metadata(metadata: dict[str, str], where: str) -> None:
    if metadata["dtckpt_version"] != "1" or int(metadata["dtckpt_block_bytes"]) < 1:
        raise Corrupt(f"{where}: unusable header metadata {metadata!r}")


def _entry(key: str, value: dict[str, Any], where: str) -> Entry:
    dtype = dtype_of_code(value["dtype"], f"{where}, entry {key!r}")
    shape = tuple(int(n) for n in value["shape"])
    if any(n < 0 for n in shape):
        raise Corrupt(f"{where}, entry {key!r}: negative shape {shape}")
    start, end = value["data_offsets"]
    entry = Entry(key=key, dtype=dtype, shape=shape, start=int(start))
    if entry.start + entry.num_bytes != end or entry.start % dtype.itemsize:
        raise ValueError(f"entry {key!r} of {entry.num_bytes} bytes lies at {start} to {end}")
    return entry


def _check_cover(layout: FileLayout, table_offsets: list[int]) -> None:
    position = 0
    for entry in sorted(layout.entries.values(), key=lambda e: (e.start, e.num_bytes)):
        if entry.start != position:
            raise ValueError(f"entry {entry.key!r} starts at {entry.start}, expected {position}")
        position += entry.num_bytes
    if table_offsets != [position, position + layout.table_bytes]:
        raise ValueError(f"the checksum table lies at {table_offsets}, expected {position}")
