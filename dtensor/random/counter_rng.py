"""Random bits that depend on a key and the global index of an element, and on nothing else.

Every element has a number: its index in the whole tensor in row-major order. A bijection scatters
these numbers over 64 bits, alike for all draws; a draw multiplies them by its key, an odd number,
and takes them through a quadratic permutation modulo 2**64, whose upper bits are the best. All of
it is integer arithmetic in a handful of tensor operators, so it is the same on every device, for
every part of a tensor that a rank may hold, and in any order. Decision 0012 says why it is no
Philox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from struct import Struct

import torch
from torch import Tensor

from ..geometry.box import Box, row_major_strides
from .kept import CHUNK, Scratch, constant, kept, scratch_of

DEVICE_CHUNK = 1 << 22
"""The same for devices that are not the CPU, which a small chunk leaves idle."""

KEPT = 1 << 17
"""Elements of every tensor, the first ones, whose scattered numbers are kept on the CPU: 1 MiB."""

_FEW = 1 << 12
"""Elements for which few operators matter more than fast ones."""

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


def further_keys(keys: Keys, number: int) -> Keys:
    """Return other keys of the same draw, for those who need any number of streams."""
    salt = number.to_bytes(8, "little")
    return _KEYS.unpack(blake2b(_KEYS.pack(*keys), digest_size=_KEYS.size, salt=salt).digest())


class Words:
    """The random 64-bit words of some elements in one draw."""

    __slots__ = ("_keys", "_scattered", "scratch")

    def __init__(self, scattered: Tensor, keys: Keys, scratch: Scratch | None = None) -> None:
        self._scattered = scattered
        self._keys = keys
        self.scratch = scratch or Scratch(scattered.shape, scattered.device)

    def of(self, elements: Tensor) -> Words:
        """Return the words of some of the elements, in memory of their own."""
        return Words(self._scattered[elements], self._keys)

    def further(self, number: int) -> Words:
        """Return other words of the same elements, in memory of their own.

        They differ from all streams, and from those of other numbers.
        """
        return Words(self._scattered, further_keys(self._keys, number))

    def stream(self, index: int) -> Words:
        """Return other words of the same elements, independent of these, in the same memory."""
        return Words(self._scattered, self._keys[index:], self.scratch)

    def signed(self) -> Tensor:
        """Return one int64 word per element, to be written as one likes; its upper bits are best.

        It is where the words of the call before were.
        """
        scattered, key = self._scattered, self._keys[0]
        word = self.scratch.get("word", torch.int64)
        # Either way it is t + 2 t**2 of t = scattered * (key | 1), modulo 2**64.
        if scattered.numel() <= _FEW:
            torch.add(scattered, scattered, alpha=key & -2, out=word)
            return word.addcmul_(word, word, value=2)
        torch.mul(scattered, key | 1, out=word)
        odd = torch.add(word, word, out=self.scratch.get("mixing", torch.int64))
        return word.mul_(odd.bitwise_or_(constant(1)))

    def upper(self, bits: int) -> Tensor:
        """Return the upper bits of the words, as signed numbers."""
        return self.signed().bitwise_right_shift_(constant(64 - bits))

    def positive(self) -> Tensor:
        """Return one number below 2**63 per element, all of whose bits are equally good."""
        word = self.signed()
        # An arithmetic shift: it cancels the sign.
        upper = torch.bitwise_right_shift(
            word, constant(32), out=self.scratch.get("mixing", torch.int64)
        )
        return word.bitwise_xor_(upper)


def scattered_indices(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return the scattered numbers of the elements in ``box`` of a tensor of ``shape``, flat."""
    mixed = _indices(shape, box, device).mul_(_SPREAD)
    return _scattered(mixed, torch.empty_like(mixed))


def _scattered(mixed: Tensor, upper: Tensor) -> Tensor:
    # The first shift is arithmetic and makes complements one, whose indices are too far apart.
    mixed.bitwise_xor_(torch.bitwise_right_shift(mixed, constant(32), out=upper)).mul_(_STIR)
    torch.bitwise_right_shift(mixed, constant(29), out=upper).bitwise_and_(constant((1 << 35) - 1))
    return mixed.bitwise_xor_(upper)


def _indices(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return the row-major index of every element of ``box``, plus ``_FIRST``, flat."""
    strides = row_major_strides(shape)
    outer, run = _contiguous_dims(shape, box)
    start = _FIRST + _start(shape, box)
    found = torch.arange(start, start + run, device=device)
    for dim in reversed(range(outer)):
        if box.sizes[dim] > 1:
            steps = torch.arange(box.sizes[dim], device=device).mul_(strides[dim])
            found = (steps.unsqueeze(1) + found).view(-1)
    return found


def _contiguous_dims(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return how many outer dims there are, and the elements of the inner ones.

    Those lie one after the other in the whole tensor.
    """
    outer, run = len(shape), 1
    while outer and box.sizes[outer:] == shape[outer:]:
        outer -= 1
        run *= box.sizes[outer]
    return outer, run


def signed(number: int) -> int:
    """Return the int64 that has the lowest 64 bits of a number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _start(shape: tuple[int, ...], box: Box) -> int:
    return sum(a * step for a, step in zip(box.offsets, row_major_strides(shape), strict=True))


def fill(
    local: Tensor,
    shape: tuple[int, ...],
    box: Box,
    keys: Keys,
    sampler: Callable[..., None],
    *parameters: Tensor,
) -> None:
    """Write a sample to ``local``, which holds ``box`` of a tensor of ``shape``.

    ``parameters`` hold the same box; the sampler gets its part of each after the part to write to.
    """
    whole = local if local.is_contiguous() else local.new_empty(box.sizes)
    flat, end = whole.view(-1), 0
    flat_parameters = [parameter.reshape(-1) for parameter in parameters]
    for scattered, scratch in pieces(shape, box, local.device):
        start, end = end, end + scattered.numel()
        given = [parameter[start:end] for parameter in flat_parameters]
        sampler(Words(scattered, keys, scratch), flat[start:end], *given)
    if whole is not local:
        local.copy_(whole)


def pieces(
    shape: tuple[int, ...], box: Box, device: torch.device
) -> Iterator[tuple[Tensor, Scratch]]:
    """Yield the scattered numbers of a box piece by piece, with memory for what is made of them."""
    if box.is_empty:
        return
    is_cpu = device.type == "cpu"
    outer, run = _contiguous_dims(shape, box)
    if is_cpu and all(size == 1 for size in box.sizes[:outer]):
        first = _start(shape, box)
        for start in range(first, first + run, CHUNK):
            count = min(CHUNK, first + run - start)
            scratch = scratch_of((count,))
            yield _scattered_run(start, count, scratch), scratch
        return
    for part in box.parts(CHUNK if is_cpu else DEVICE_CHUNK):
        scratch = scratch_of((part.numel,)) if is_cpu else Scratch((part.numel,), device)
        yield scattered_indices(shape, part, device), scratch


def _scattered_run(start: int, count: int, scratch: Scratch) -> Tensor:
    """Return what ``scattered_indices`` does for neighbours; it may be in ``scratch``."""
    if start + count <= KEPT:
        return _first_scattered()[start : start + count]
    first = signed((_FIRST + start) * _SPREAD)
    mixed = scratch.get("scattered", torch.int64)
    torch.add(_steps()[:count], first, out=mixed)
    return _scattered(mixed, scratch.get("mixing", torch.int64))


@kept(1)
def _first_scattered() -> Tensor:
    return scattered_indices((KEPT,), Box.whole((KEPT,)), torch.device("cpu"))


@kept(1)
def _steps() -> Tensor:
    return torch.arange(CHUNK, device="cpu").mul_(_SPREAD)


def scaled(words: Tensor, offset: float, exponent: int, out: Tensor) -> Tensor:
    """Write ``offset + words * 2**exponent`` to ``out``, which is float32 or float64."""
    out.copy_(words)
    # A power of two multiplies exactly, so fused and separate operations round alike.
    return torch.add(constant(offset, out.dtype), out, alpha=2.0**exponent, out=out)
