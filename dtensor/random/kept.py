"""Tensors that outlive the call that made them: constants, tables, memory to work in.

One that is made within a fake mode, a transform or inference mode belongs to it, and would spoil
every later call. So kept tensors are made outside of all modes, and where torch has no way to do
that nothing is kept. What is kept is never written, but for memory that one thread has for itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..comm.caches import remembered
from ..torch_private import can_leave_modes, outside_modes

P = ParamSpec("P")
T = TypeVar("T")

CHUNK = 1 << 15
"""Elements worked on at a time, so that what is in between stays in the cache of a core."""

_MAX_CONSTANTS = 1024
_MAX_SIZES = 64


def kept(limit: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Remember the tensors that a function makes of hashable arguments, ``limit`` results at most.

    The function must name the device.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        if not can_leave_modes():
            return make

        @wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> T:
            with outside_modes():
                return make(*args, **kwargs)

        return remembered(limit)(made)

    return decorate


@kept(_MAX_CONSTANTS)
def constant(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a number in a tensor: operators take those sooner than Python's own."""
    return torch.tensor(value, dtype=dtype, device="cpu")


class Scratch:
    """Memory for what lies between random words and samples, of one shape.

    All of it should stay in the cache of a core. So floats are worked on where the words were that
    they were made of. One draw at a time may use it.
    """

    __slots__ = ("_device", "_memory", "_numel", "_shape", "_tensors", "_whole")

    def __init__(
        self, shape: Sequence[int], device: torch.device, whole: Scratch | None = None
    ) -> None:
        """``whole`` is memory that this is to be the beginning of."""
        self._shape = tuple(shape)
        self._numel = math.prod(self._shape)
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self._tensors: dict[tuple[str | int, torch.dtype], Tensor] = {}
        self._whole = whole

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the tensor of that name and dtype, whatever is in it; names share no memory."""
        found = self._tensors.get((name, dtype))
        return self._keep(name, dtype, name, 0) if found is None else found

    def slot(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return memory for floats or for their bits; the first ones are "mixing" and "word"."""
        found = self._tensors.get((number, dtype))
        if found is not None:
            return found
        half = number % 2 if dtype.itemsize == 4 else 0
        place = number // 2 if dtype.itemsize == 4 else number
        return self._keep(number, dtype, _PLACES[place], half)

    def _keep(self, key: str | int, dtype: torch.dtype, name: str, half: int) -> Tensor:
        if self._whole is None:  # for one call, and so in its modes
            found = self._part_of(name, dtype, half)
        else:
            with outside_modes():
                found = self._part_of(name, dtype, half)
        self._tensors[key, dtype] = found
        return found

    def _part_of(self, name: str, dtype: torch.dtype, half: int) -> Tensor:
        cells = self._memory_of(name).view(dtype)
        start = half * (len(cells) // 2)
        return cells[start : start + self._numel].view(self._shape)

    def _memory_of(self, name: str) -> Tensor:
        if self._whole is not None:
            return self._whole._memory_of(name)
        if name not in self._memory:
            self._memory[name] = torch.empty(self._numel, dtype=torch.int64, device=self._device)
        return self._memory[name]


_PLACES = ("mixing", "word", "third", "fourth", "fifth")


class _KeptScratch(threading.local):
    """Memory for chunks on the CPU: as much as one chunk needs in every thread that draws."""

    def __init__(self) -> None:
        self.whole = Scratch((CHUNK,), torch.device("cpu"))
        self.by_shape: dict[tuple[int, ...], Scratch] = {}


_kept = _KeptScratch()


def scratch_of(shape: tuple[int, ...]) -> Scratch:
    """Return this thread's memory on the CPU for a draw of a shape of at most `CHUNK` elements."""
    found = _kept.by_shape.get(shape)
    if found is None:
        whole = _kept.whole if can_leave_modes() else None
        found = Scratch(shape, torch.device("cpu"), whole)
        if whole is None:
            return found
        if len(_kept.by_shape) >= _MAX_SIZES:
            _kept.by_shape.clear()
        _kept.by_shape[shape] = found
    return found
