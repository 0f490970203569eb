"""A reader that knows docs/format.md alone finds in a compressed checkpoint what was saved."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import zstandard

import dtckpt.checkpoint as ckpt
from dtckpt.storage import LocalStore

from .. import golden

DATA = Path(__file__).parents[2] / "data" / "v2"
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}


def decoded(stored: bytes, size: int, width: int) -> bytes:
    if len(stored) == size:
        return stored
    lengths = struct.unpack_from(f"<{width}I", stored)
    block, at = bytearray(size), 4 * width
    for i, length in enumerate(lengths):
        plane_bytes = (size - i + width - 1) // width
        plane = stored[at : at + length]
        at += length
        if length != plane_bytes:
            plane = zstandard.ZstdDecompressor().decompress(plane, max_output_size=plane_bytes)
        block[i::width] = plane
    assert at == len(stored)
    return bytes(block)


def chunks_of(path: Path, record: dict[str, Any]) -> dict[str, bytes]:
    """Every chunk of a compressed data file by its key."""
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    assert (len(data), length) == (record["size"], record["header_bytes"])
    assert xxhash.xxh3_128_hexdigest(data[:length]) == record["header"]
    header = json.loads(data[8:length])
    metadata, table = header.pop("__metadata__"), header.pop("__dtckpt_blocks__")
    assert metadata["dtckpt_version"] == "2"
    rows = data[length + record["stored_bytes"] :]
    assert xxhash.xxh3_128_hexdigest(rows) == record["blocks"]
    count, row_bytes = table["shape"]
    assert (row_bytes, len(rows)) == (20, 20 * count)
    lengths = struct.unpack(f"<{count}I", rows[16 * count :])
    assert sum(lengths) == record["stored_bytes"]
    found: dict[str, bytes] = {}
    block, at, block_bytes = 0, length, int(metadata["dtckpt_block_bytes"])
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        chunk = b""
        for low in range(start, end, block_bytes):
            size = min(block_bytes, end - low)
            part = decoded(data[at : at + lengths[block]], size, WIDTHS[entry["dtype"]])
            assert xxhash.xxh3_128_digest(part) == rows[16 * block : 16 * block + 16]
            chunk += part
            at += lengths[block]
            block += 1
        found[key] = chunk
    assert block == count
    return found


def check(place: Path) -> None:
    manifest = json.loads((place / "manifest.json").read_bytes())
    assert (manifest["version"], manifest["requires"]) == (2, ["compressed"])
    files = [
        chunks_of(place / "data" / manifest["save_id"] / f"{r['rank']:05d}.compressed", r)
        for r in manifest["files"]
    ]
    rows, columns = (size // 2 for size in golden.LARGE_SHAPE)
    for name in golden.LARGE:
        for rank, chunks in enumerate(files):
            low, left = rank // 2 * rows, rank % 2 * columns
            key = f"large/{name}[{low}:{low + rows},{left}:{left + columns}]"
            expected = golden.large(name)[low : low + rows, left : left + columns]
            assert chunks[key] == expected.contiguous().view(torch.uint8).numpy().tobytes()
    assert files[0]["model/scalar"] == golden.whole("scalar").numpy().tobytes()


@pytest.mark.parametrize("is_new", [False, True])
def test_what_is_saved_is_what_the_page_says(tmp_path: Path, is_new: bool) -> None:
    """Both the checkpoint that is kept and what this version writes."""
    if is_new:
        golden.write(str(tmp_path / "new"), 2)
    check(tmp_path / "new" if is_new else DATA)


def test_planes_are_stored_in_both_ways() -> None:
    """Else the checkpoint that is kept would prove little."""
    manifest = ckpt.read_manifest(LocalStore(DATA))
    for record in manifest.files:
        assert record.stored_bytes is not None
        assert 0.5 * record.data_bytes < record.stored_bytes < 0.8 * record.data_bytes
