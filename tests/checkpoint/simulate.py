"""Saves and loads of many ranks in one thread: the engine without processes and without torch."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from dtckpt.checkpoint import read_manifest
from dtckpt.checkpoint.files.committing import check_complete, commit
from dtckpt.checkpoint.files.manifest import FileRecord, Manifest
from dtckpt.checkpoint.files.stored_data import StoredData
from dtckpt.checkpoint.files.writing import Chunk, Contents, write_file
from dtckpt.checkpoint.reading import limits
from dtckpt.checkpoint.reading.execution import execute
from dtckpt.checkpoint.reading.read_plan import plan_reads
from dtckpt.checkpoint.reading.wants import ArraySink, Want
from dtckpt.checkpoint.saving.writers import assign_writers
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.checkpoint.tensors.spec import GlobalTensor
from dtckpt.dtensor import Box, IrregularLayout, Layout
from dtckpt.storage import MemoryStore, Store

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Given:
    """A whole tensor and how it is laid out."""

    array: Array
    """Items as unsigned ints."""
    code: str
    layout: Layout | IrregularLayout


@dataclass(frozen=True)
class ArraySource:
    """The bytes of an array."""

    array: Array

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes at most ``max_bytes`` at a time."""
        data = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data
        for start in range(0, len(data), max_bytes):
            yield data[start : start + max_bytes]


@dataclass(frozen=True)
class CountingSink:
    """Fills an array, counting how often each element is stored."""

    array: Array
    count: Array

    @property
    def is_memory(self) -> bool:
        """Return False."""
        return False

    def memory(self) -> None:
        """Return None, so that every element is counted."""

    def put(self, part: Box, items: Array) -> None:
        """Store the items."""
        self.array[part.slices] = items
        self.count[part.slices] += 1


def save_all(
    given: Mapping[str, Given],
    ranks: Sequence[int],
    block_bytes: int = 64,
    *,
    is_compressed: bool = False,
) -> tuple[Store, list[FileRecord]]:
    """Write what every rank would write, commit, and return the store and the files."""
    store, save_id = MemoryStore(), secrets.token_hex(4)
    tensors = assign_writers(
        GlobalTensor(name=name, dtype=DTYPES[g.code], shape=g.layout.shape, layout=g.layout)
        for name, g in given.items()
    )
    files: list[FileRecord] = []
    for rank in ranks:
        chunks = [
            Chunk(tensor=t, box=box, source=ArraySource(given[t.name].array[box.slices]))
            for t in tensors
            for box in t.chunks_of(rank)
        ]
        contents = Contents(chunks)
        record = write_file(
            store,
            contents,
            save_id=save_id,
            rank=rank,
            block_bytes=block_bytes,
            is_compressed=is_compressed,
        )
        if record:
            files.append(record)
    made = Manifest(
        save_id=save_id,
        tensors={tensor.name: tensor for tensor in tensors},
        tree={"dict": {name: {"tensor": name} for name in given}},
        files=tuple(files),
    )
    check_complete(store, made)
    commit(store, made, overwrite=False)
    return store, files


def load_box(store: Store, name: str, box: Box) -> Array:
    """Return one box of a stored tensor, read in two ways that must agree.

    Where items are put, every element must have been stored exactly once.
    """
    data = StoredData(store, read_manifest(store))
    tensor = data.manifest.tensors[name]
    array = np.zeros(box.sizes, dtype=tensor.dtype.items)
    count = np.zeros(box.sizes, dtype=int)
    reads = plan_reads(data, [Want(tensor=tensor, box=box, sink=CountingSink(array, count))])
    execute(reads)
    assert (count == 1).all()
    straight = np.zeros_like(array)
    with mock.patch.object(limits, "IN_PLACE_BYTES", 1):  # so that small boxes take this way too
        reads = plan_reads(data, [Want(tensor=tensor, box=box, sink=ArraySink(straight))])
    execute(reads)
    assert np.array_equal(straight, array)
    return array


def items(shape: Sequence[int], code: str, seed: int = 0) -> Array:
    """Return random items of a dtype as ``DType.items``."""
    size = DTYPES[code].itemsize
    if size == 16:
        return items((*shape, 2), "U64", seed).view(DTYPES[code].items)[..., 0]
    high = 2 if code == "BOOL" else 2 ** (8 * size) - 1
    rng = np.random.default_rng(seed)
    return rng.integers(0, high, size=tuple(shape), dtype=f"u{size}")
