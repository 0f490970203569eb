"""Copying what a rank is to write into memory of its own, so that the training may go on.

Only the bytes that this rank writes are copied, once, to where they lie in the file. The memory is
kept for the next save.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...storage.arena import Arena
from ..files.writing import Chunk


@dataclass(frozen=True, slots=True)
class _Staged:
    """A chunk in staging memory."""

    view: memoryview

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for start in range(0, len(self.view), max_bytes):
            yield self.view[start : start + max_bytes]


class StagingArea:
    """Memory for the bytes that one save in the background writes; reused from save to save."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._unpin: Callable[[], object] | None = None

    def stage(
        self,
        chunks: Sequence[Chunk],
        tensors: Sequence[torch.Tensor],
        on_progress: Callable[[], None],
    ) -> tuple[list[Chunk], memoryview]:
        """Copy chunks, given in file order, and return them as staged, with the memory's image.

        ``tensors`` hold their elements. The memory belongs to the caller until its save has ended.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        image = self._memory(size, pinned=any(tensor.is_cuda for tensor in tensors))
        whole = torch.frombuffer(image, dtype=torch.uint8) if size else torch.empty(0)
        staged: list[Chunk] = []
        start = 0
        for chunk, source in zip(chunks, tensors, strict=True):
            end = start + source.nbytes
            if end > start:
                target = whole[start:end].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=source.is_cuda)
                on_progress()
            staged.append(replace(chunk, source=_Staged(image[start:end])))
            start = end
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return staged, image

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
