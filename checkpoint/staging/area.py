"""Memory into which a rank copies what it is to write, so that the training may go on.

Only the bytes that this rank writes, or may have to write for others, are copied, once, to where
they lie in the file. The memory is kept for the next save.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...storage.arena import Arena
from ..files.writing import Chunk

_PAGE_BYTES = 1 << 12


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A copy that is to be made."""

    name: str
    """Of the tensor in the checkpoint."""
    source: torch.Tensor
    target: torch.Tensor
    """Contiguous memory for the same elements, in the staging area."""

    def make(self) -> None:
        """Copy; from a GPU in the order of its current stream, without waiting for it."""
        self.target.copy_(self.source, non_blocking=self.source.is_cuda)


@dataclass(frozen=True, slots=True)
class Staged:
    """Where everything of a data file is, or will be, once it has been copied."""

    chunks: list[Chunk]
    image: memoryview
    """Whole pages of memory, in which all chunks lie as in the file."""
    copies: list[Copy]


@dataclass(frozen=True, slots=True)
class _InMemory:
    """The bytes of a chunk in staging memory."""

    view: memoryview

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for start in range(0, len(self.view), max_bytes):
            yield self.view[start : start + max_bytes]


class StagingArea:
    """Memory for the bytes that one save in the background writes; reused from save to save."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._unpin: Callable[[], object] | None = None

    def lay_out(self, files: Sequence[Sequence[tuple[Chunk, torch.Tensor]]]) -> list[Staged]:
        """Give each chunk, of those of every file in its order, its memory.

        Beside it is the tensor with its elements. The memory belongs to the caller until its save
        has ended.
        """
        sizes = [_in_pages(sum(tensor.nbytes for _, tensor in file)) for file in files]
        pinned = any(tensor.is_cuda for file in files for _, tensor in file)
        memory = self._memory(sum(sizes), pinned=pinned)
        staged: list[Staged] = []
        for file, size in zip(files, sizes, strict=True):
            staged.append(_laid_out(file, memory[:size]))
            memory = memory[size:]
        return staged

    def _memory(self, size: int, *, pinned: bool) -> memoryview:
        arena = self._arena
        if arena is None or not size <= arena.size <= 2 * size + (64 << 20):
            self.release()
            arena = self._arena = Arena(max(size, 1))
        if pinned and self._unpin is None:
            self._unpin = weakref.finalize(self, _unpin, arena) if _pin(arena) else None
        return arena.view[:size]

    def release(self) -> None:
        """Give the memory back to the system."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _laid_out(file: Sequence[tuple[Chunk, torch.Tensor]], image: memoryview) -> Staged:
    staged = Staged([], image, [])
    start = 0
    for chunk, source in file:
        tensor, end = chunk.tensor, start + source.nbytes
        if end > start:
            count, dtype = source.numel(), source.dtype
            flat = torch.frombuffer(image, dtype=dtype, count=count, offset=start)
            target = flat.view(source.shape)
            staged.copies.append(Copy(tensor.name, source, target))
        memory = _InMemory(image[start:end])
        staged.chunks.append(Chunk(tensor=tensor, box=chunk.box, source=memory))
        start = end
    return staged


def copy_all(copies: Iterable[Copy], on_progress: Callable[[], None]) -> None:
    """Make copies and return when they are made."""
    devices: set[torch.device] = set()
    for copy in copies:
        copy.make()
        if copy.source.is_cuda:
            devices.add(copy.source.device)
        on_progress()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _pin(arena: Arena) -> bool:
    """Pin memory, or every copy from a device would go through a buffer of the driver."""
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(arena.address, arena.size, 0)) == 0


def _unpin(arena: Arena) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(arena.address)


class StagingPool:
    """Staging areas that no save is using: one is kept, since saves mostly follow one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: StagingArea | None = None

    def take(self) -> StagingArea:
        """Return an area that nobody else uses."""
        with self._lock:
            area, self._free = self._free, None
        return area or StagingArea()

    def give_back(self, area: StagingArea) -> None:
        """Keep an area for the next save, or let it go if one is kept already."""
        with self._lock:
            if self._free is None:
                self._free = area
