"""Random bits that depend on a key and the global index of an element, and on nothing else.

Every element has a number: its index in the whole tensor in row-major order. A bijection scatters
these numbers over 64 bits, alike for all draws; a draw multiplies them by its key, an odd number,
and takes them through a quadratic permutation modulo 2**64, whose upper bits are the best. All of
it is integer arithmetic in a handful of tensor operators, so it is the same on every device, for
every part of a tensor that a rank may hold, and in any order. Decision 0012 says why it is no
Philox.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from struct import Struct

import torch
from torch import Tensor

from .box import Box, row_major_strides

CHUNK = 1 << 15
"""Elements worked on at a time, so that what is in between stays in the cache of a core."""

_FIRST = 1 << 59  # the number of element 0: what multiplication leaves as it is must not occur
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio, and below pi, as odd 64-bit fractions
_STIR = 0x243F6A8885A308D3
_SEED_AND_OFFSET = Struct("<QQ")
_KEYS = Struct("<8q")

Keys = tuple[int, ...]
Sampler = Callable[["Words", Tensor], None]
"""Writes a sample to a contiguous tensor, made of words of the same shape."""


def draw_keys(seed: int, offset: int) -> Keys:
    """Return the keys of one draw, one per stream, from two unsigned 64-bit numbers."""
    digest = blake2b(_SEED_AND_OFFSET.pack(seed, offset), digest_size=_KEYS.size)
    return _KEYS.unpack(digest.digest())


class Words:
    """The random 64-bit words of some elements in one draw."""

    __slots__ = ("_buffer", "_keys", "_scattered")

    def __init__(self, scattered: Tensor, keys: Keys, buffer: Tensor | None = None) -> None:
        self._scattered = scattered
        self._keys = keys
        self._buffer = buffer

    def stream(self, index: int) -> Words:
        """Return other words of the same elements, independent of these."""
        return Words(self._scattered, self._keys[index:])

    def signed(self) -> Tensor:
        """Return one int64 word per element, to be written as one likes; its upper bits are best.

        It is in the buffer where there is one, as the words of the call before were.
        """
        scattered = self._scattered
        even = self._keys[0] & -2
        word = torch.add(scattered, scattered, alpha=even, out=self._buffer)  # times an odd number
        return word.addcmul_(word, word, value=2)

    def upper(self, bits: int) -> Tensor:
        """Return the upper bits of the words, as signed numbers."""
        return self.signed().bitwise_right_shift_(constant(64 - bits))

    def positive(self) -> Tensor:
        """Return one number below 2**63 per element, all of whose bits are equally good."""
        word = self.signed()
        return word.bitwise_xor_(word >> constant(32))  # an arithmetic shift: it cancels the sign


def scattered_indices(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return the scattered numbers of the elements in ``box`` of a tensor of ``shape``, flat."""
    mixed = _indices(shape, box, device).mul_(_SPREAD)
    mixed.bitwise_xor_(mixed >> 32).mul_(_STIR)
    return mixed.bitwise_xor_((mixed >> 29).bitwise_and_((1 << 35) - 1))


def _indices(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return the row-major index of every element of ``box``, plus ``_FIRST``, flat."""
    strides = row_major_strides(shape)
    start = _FIRST + sum(a * step for a, step in zip(box.offsets, strides, strict=True))
    outer = len(shape)
    run = 1  # elements of the inner dims that lie one after the other
    while outer and box.sizes[outer:] == shape[outer:]:
        outer -= 1
        run *= box.sizes[outer]
    found = torch.arange(start, start + run, device=device)
    for dim in reversed(range(outer)):
        if box.sizes[dim] > 1:
            steps = torch.arange(box.sizes[dim], device=device).mul_(strides[dim])
            found = (steps.unsqueeze(1) + found).view(-1)
    return found


def fill(local: Tensor, shape: tuple[int, ...], box: Box, keys: Keys, sampler: Sampler) -> None:
    """Write a sample to ``local``, which holds ``box`` of a tensor of ``shape``."""
    whole = local if local.is_contiguous() else local.new_empty(box.sizes)
    flat, start = whole.view(-1), 0
    for part in () if box.is_empty else box.parts(CHUNK):
        end = start + part.numel
        sampler(Words(scattered_indices(shape, part, local.device), keys), flat[start:end])
        start = end
    if whole is not local:
        local.copy_(whole)


@cache
def constant(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a number in a tensor: operators take those sooner than Python's own."""
    return torch.tensor(value, dtype=dtype)


def scaled(words: Tensor, offset: float, exponent: int, out: Tensor) -> Tensor:
    """Write ``offset + words * 2**exponent`` to ``out``, which is float32 or float64."""
    out.copy_(words)
    # A power of two multiplies exactly, so fused and separate operations round alike.
    return torch.add(constant(offset, out.dtype), out, alpha=2.0**exponent, out=out)
