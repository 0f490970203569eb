"""Data files: valid safetensors files that carry the checksums of their own blocks.

::

    bytes 0-7         length N of the header, little endian
    bytes 8 - 8+N     JSON header, padded with spaces so that the data starts on a 4 KiB boundary
    data region       chunks back to back, wide dtypes first so that each is aligned to its items
    checksum table    xxh3_128 of every block of every chunk, as the last entry of the header

In a compressed file blocks are stored shorter, and their stored lengths follow the checksums. Its
header is the same, of the chunks as they are when decoded, so it is known before any is written.

docs/format.md describes the format for implementers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from dtckpt.errors import CheckpointError, Corrupt

from ..state.limits import (
    MAX_BLOCK_BYTES,
    MAX_SIZE,
    MIN_BLOCK_BYTES,
    check_metadata_bytes,
    check_shape,
    json_memory,
    parse_json,
    shown,
    text_of,
)
from ..tensors.dtypes import IN_FILES, DType, dtype_of_code
from .blocks import DEFAULT_BLOCK_BYTES, DIGEST_BYTES, LENGTH_BYTES, num_blocks

ALIGNMENT = 4096
_DIGITS = re.compile(r"[0-9]{1,9}")
TABLE_KEY = "__dtckpt_blocks__"
PLAIN, COMPRESSED = "1", "2"
"""Versions of data files."""


class Entry(NamedTuple):
    """One chunk of a data file. A named tuple, because headers have ten thousands of them."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    """Shape as the header states it, in values."""
    start: int
    """First byte, counted from the start of the data region."""
    num_bytes: int
    """Length in bytes."""
    first_block: int
    """Number of its first checksum block in the table."""
    strides: tuple[int, ...] | None = None
    """Bytes between neighbours in every dim, where another program stored it other than row-major;
    ``num_bytes`` is then from the first to past the last element."""

    @property
    def end(self) -> int:
        """One past the last byte in the data region."""
        return self.start + self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """Where everything lies in a data file."""

    save_id: str
    block_bytes: int
    data_start: int
    """Offset of the data region in the file; also the number of header bytes."""
    data_bytes: int
    """Length of the data region."""
    num_blocks: int
    """Number of checksum blocks of all entries."""
    entries: dict[str, Entry]
    """By key, in file order."""
    references: Mapping[str, str] = field(default_factory=dict[str, str])
    """Chunks that lie, under the same key, in a file of an earlier save: which one, by key."""
    is_compressed: bool = False
    """Whether blocks may be stored shorter than they are. Offsets of entries, and all lengths but
    that of the table, are of the decoded file."""

    @property
    def table_start(self) -> int:
        """Offset of the checksum table in the file."""
        return self.data_start + self.data_bytes

    @property
    def table_bytes(self) -> int:
        """Length of the checksum table."""
        return _row_bytes(self.is_compressed) * self.num_blocks

    @property
    def size(self) -> int:
        """Length of the file; if it is compressed, the most that it may have."""
        return self.table_start + self.table_bytes


def lay_out(
    chunks: Iterable[tuple[str, DType, tuple[int, ...]]],
    *,
    save_id: str,
    references: Mapping[str, str] | None = None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    is_compressed: bool = False,
) -> tuple[FileLayout, bytes]:
    """Return the layout and the header bytes of a file of (key, dtype, shape) chunks.

    Wide dtypes come first and keep their given order otherwise. Raises CheckpointError if the
    header is longer than readers take it.
    """
    entries: dict[str, Entry] = {}
    metadata = {
        "format": "pt",
        "dtckpt_version": COMPRESSED if is_compressed else PLAIN,
        "dtckpt_save_id": save_id,
        "dtckpt_block_bytes": str(block_bytes),
    }
    if references:
        metadata["dtckpt_references"] = json.dumps(references)
    header: dict[str, Any] = {"__metadata__": metadata}
    start = block = 0
    for key, dtype, sizes in sorted(chunks, key=lambda chunk: -chunk[1].itemsize):
        num_bytes = math.prod(sizes) * dtype.itemsize
        shape = dtype.file_shape(sizes)
        entries[key] = Entry(key, dtype.in_file, shape, start, num_bytes, block)
        header[key] = {
            "dtype": dtype.in_file.code,
            "shape": shape,
            "data_offsets": (start, start + num_bytes),
        }
        start += num_bytes
        block += num_blocks(num_bytes, block_bytes)
    row_bytes = _row_bytes(is_compressed)
    header[TABLE_KEY] = {
        "dtype": "U8",
        "shape": (block, row_bytes),
        "data_offsets": (start, start + block * row_bytes),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    check_metadata_bytes(json_memory(text), f"the header of a data file of {len(entries)} chunks")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    layout = FileLayout(
        save_id=save_id,
        block_bytes=block_bytes,
        data_start=8 + len(text),
        data_bytes=start,
        num_blocks=block,
        entries=entries,
        references=references or {},
        is_compressed=is_compressed,
    )
    return layout, len(text).to_bytes(8, "little") + text


def parse_header(data: bytes, where: str) -> FileLayout:
    """Return the layout that a header describes; Corrupt, naming ``where``, if it is malformed."""
    length = int.from_bytes(data[:8], "little")
    if length != len(data) - 8:
        raise Corrupt(f"{where}: the header has {len(data) - 8} bytes, its length says {length}")
    try:
        header = cast(dict[str, Any], parse_json(data[8:], where))
        metadata = header.pop("__metadata__")
        table = header.pop(TABLE_KEY)
        block_bytes = _block_bytes(metadata["dtckpt_block_bytes"])
        if metadata["dtckpt_version"] not in (PLAIN, COMPRESSED):
            raise Corrupt(f"{where}: unusable header metadata {shown(metadata)}")
        entries = entries_of(header, block_bytes, where)
        last = next(reversed(entries.values()), None)
        layout = FileLayout(
            save_id=text_of(metadata["dtckpt_save_id"], "dtckpt_save_id"),
            block_bytes=block_bytes,
            data_start=len(data),
            data_bytes=last.end if last else 0,
            num_blocks=last.first_block + num_blocks(last.num_bytes, block_bytes) if last else 0,
            entries=entries,
            references=_references(metadata, where),
            is_compressed=metadata["dtckpt_version"] == COMPRESSED,
        )
        _check_table(layout, table["data_offsets"])
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{where}: malformed header of {len(data)} bytes: {shown(error)}") from error
    return layout


def _row_bytes(is_compressed: bool) -> int:
    """Return how many bytes of the table each block has."""
    return DIGEST_BYTES + LENGTH_BYTES * is_compressed


def _block_bytes(told: object) -> int:
    text = text_of(told, "dtckpt_block_bytes")
    if not _DIGITS.fullmatch(text) or not MIN_BLOCK_BYTES <= int(text) <= MAX_BLOCK_BYTES:
        raise ValueError(
            f"blocks of {shown(told)} bytes, expected {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}"
        )
    return int(text)


def _references(metadata: dict[str, Any], where: str) -> dict[str, str]:
    text = text_of(metadata.get("dtckpt_references", "{}"), "dtckpt_references")
    told = cast(dict[str, Any], parse_json(text.encode(), f"{where}: dtckpt_references"))
    if not all(isinstance(file_id, str) for file_id in told.values()):
        raise ValueError(f"malformed references {shown(told)}")
    return told


def _check_table(layout: FileLayout, offsets: list[int]) -> None:
    expected = [layout.data_bytes, layout.data_bytes + layout.table_bytes]
    if offsets != expected:
        raise ValueError(f"the checksum table lies at {shown(offsets)}, expected {expected}")


def entries_of(
    header: dict[str, Any], block_bytes: int, where: str, *, aligned: bool = True
) -> dict[str, Entry]:
    """Return all entries in file order; ValueError unless they follow one another without gaps.

    They are ``aligned`` to their items unless another program wrote them.
    """
    entries: dict[str, Entry] = {}
    position = block = 0
    for key, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = value["data_offsets"]
        code = value["dtype"]
        dtype = IN_FILES.get(code) or dtype_of_code(code, f"{where}: {key!r}", is_header=True)
        shape = tuple(value["shape"])
        if not all(type(size) is int and 0 <= size < MAX_SIZE for size in shape):
            raise ValueError(f"entry {shown(key)} has the shape {shown(shape)}")
        check_shape(shape, "entry", key)
        num_bytes = math.prod(shape) // dtype.packed * dtype.itemsize
        is_odd = aligned and start % dtype.itemsize != 0
        if (start, end) != (position, position + num_bytes) or is_odd:
            raise ValueError(
                f"entry {shown(key)} of {num_bytes} bytes lies at {shown(start)} to {shown(end)}, "
                f"expected it at {position}"
            )
        entries[key] = Entry(key, dtype, shape, position, num_bytes, block)
        position += num_bytes
        block += -(-num_bytes // block_bytes)
    return entries
