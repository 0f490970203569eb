"""Which bytes of a large tensor stand for all of it when copies on several ranks are compared.

Copies that have run apart differ nearly everywhere, since every step of a training changes every
element by what differs already. So a few pages of a tensor tell of it, and other ones at every save
tell in time of a difference that keeps to its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .spec import fingerprint

WHOLE_BYTES = 256 << 10
"""Tensors up to this size are compared whole: counters, running statistics, biases."""
PAGE_BYTES = 4096
_PAGES_PER_SAMPLE = 16
"""One page of so many is compared."""
_MAX_PAGES = 256
"""At most so many pages of a tensor are compared, 1 MiB."""


class Sampling:
    """A choice of pages of each tensor, the same on all ranks that have the same seed."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._pages: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes that stand for a tensor; the tensor itself where it is small.

        They depend on its elements alone: not on its name, since one rank may know by two names
        what another has twice, nor on its strides or its device.
        """
        if tensor.nbytes <= WHOLE_BYTES:
            return tensor
        pages, start = self.pages(tensor.nbytes)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            flat = tensor.view(-1).view(torch.uint8)
            whole = len(flat) // PAGE_BYTES * PAGE_BYTES
            rows = flat[start : start + whole].view(-1, PAGE_BYTES)
            return rows.index_select(0, torch.from_numpy(pages).to(tensor.device))
        itemsize = tensor.element_size()
        first = (pages * PAGE_BYTES + start) // itemsize
        items = first[:, None] + np.arange(PAGE_BYTES // itemsize)
        if not tensor.is_complex() and not tensor.is_neg():
            tensor = tensor.view(_INT_OF_SIZE[itemsize])  # not all other types can be taken
        return torch.take(tensor, torch.from_numpy(items).to(tensor.device))

    def pages(self, num_bytes: int) -> tuple[np.ndarray[Any, Any], int]:
        """Return which pages are compared, one out of every stretch of them, and where they begin.

        Every page has the same chance. What does not fill a page lies at the end or, as often, at
        the beginning, and so is compared in turn as well.
        """
        if num_bytes not in self._pages:
            size = num_bytes.to_bytes(8, "little")
            seed = int.from_bytes(fingerprint(self._seed, size)[:8], "little")
            num_pages = num_bytes // PAGE_BYTES
            count = min(-(-num_pages // _PAGES_PER_SAMPLE), _MAX_PAGES)
            bounds = np.arange(count + 1, dtype=np.int64) * num_pages // count
            chosen = _mixed(np.arange(count, dtype=np.uint64) + np.uint64(seed >> 1))
            within = (chosen % np.diff(bounds).astype(np.uint64)).astype(np.int64)
            self._pages[num_bytes] = bounds[:-1] + within, num_bytes % PAGE_BYTES * (seed & 1)
        return self._pages[num_bytes]


_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return numbers of which each bit depends on all bits of the given ones (splitmix64)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
