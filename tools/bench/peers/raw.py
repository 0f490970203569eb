"""The limits of the machine: the same bytes by plain system calls, one process per rank."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..folders import sync_files
from ..state import State

_MAX_BUFFERS = 512
_CHUNK_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_PAGE_BYTES = 4096


class Raw:
    """``posix_fallocate``, ``pwritev`` from the tensors, fsync; ``preadv`` into the tensors."""

    name = "raw"

    def save(self, state: State, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = _file(state, path)
        with _opened(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) as descriptor:
            os.posix_fallocate(descriptor, 0, max(_num_bytes(state), 1))
            _move(os.pwritev, descriptor, state.locals.values())
        sync_files(file)

    def load(self, state: State, path: Path) -> None:
        with _opened(_file(state, path), os.O_RDONLY) as descriptor:
            _move(os.preadv, descriptor, state.locals.values())


class RawHashed(Raw):
    """``preadv`` of a block at a time, each hashed while the processor still has it.

    What verifying costs at least: reading in one go leaves the processor's caches out, and what was
    read without them has to be fetched again to be hashed.
    """

    name = "raw, hashed"

    def load(self, state: State, path: Path) -> None:
        with _opened(_file(state, path), os.O_RDONLY) as descriptor:
            offset = 0
            for tensor in state.locals.values():
                view = bytes_of(tensor)
                for start in range(0, len(view), _BLOCK_BYTES):
                    block = view[start : start + _BLOCK_BYTES]
                    if os.preadv(descriptor, [block], offset) != len(block):
                        raise OSError(f"file descriptor {descriptor}: it ended at byte {offset}")
                    xxhash.xxh3_128_digest(block)
                    offset += len(block)


class RawDirect:
    """Direct I/O of as many bytes from one huge-page buffer: what the disk takes, no copy made."""

    name = "raw O_DIRECT"

    def __init__(self) -> None:
        self._arena = mmap.mmap(-1, _CHUNK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._arena.madvise(mmap.MADV_HUGEPAGE)
        self._arena.write(os.urandom(_CHUNK_BYTES))

    def save(self, state: State, path: Path) -> None:
        """Write as many bytes as this rank holds, rounded up to whole pages."""
        path.mkdir(parents=True, exist_ok=True)
        file = _file(state, path)
        size = -(-_num_bytes(state) // _PAGE_BYTES) * _PAGE_BYTES
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT
        with _opened(file, flags) as descriptor, memoryview(self._arena) as view:
            os.posix_fallocate(descriptor, 0, max(size, _PAGE_BYTES))
            offset = 0
            while offset < size:
                offset += os.pwrite(descriptor, view[: min(_CHUNK_BYTES, size - offset)], offset)
        sync_files(file)


def _num_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.locals.values())


def _file(state: State, path: Path) -> Path:
    return path / f"{state.rank}.bin"


@contextmanager
def _opened(file: Path, flags: int) -> Generator[int]:
    descriptor = os.open(file, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _move(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, tensors: Iterable[Tensor]
) -> None:
    """Write or read all tensors in large vectored calls, going on where one was cut short."""
    views = [bytes_of(tensor) for tensor in tensors if tensor.nbytes]
    offset = 0
    while views:
        moved = call(descriptor, views[:_MAX_BUFFERS], offset)
        if moved <= 0:
            raise OSError(f"file descriptor {descriptor}: it ended at byte {offset}")
        offset += moved
        while views and moved >= views[0].nbytes:
            moved -= views.pop(0).nbytes
        if moved:
            views[0] = views[0][moved:]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # numpy's stubs hide its buffer
    return memoryview(array)
