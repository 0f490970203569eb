"""Norms of gradients whose bits do not depend on who holds which elements.

Squares are cut into digits of 26 bits at places that are the same for all numbers. The sum of each
digit is a whole number, exact in any order, of the three highest places that any number reaches:
what is left aside is less than 2**-52 of the largest square (the binned sums of Demmel and Nguyen,
"Parallel reproducible summation", IEEE Transactions on Computers 64 (2015), in a simple form).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..mesh.device_mesh import DeviceMesh
from ..mesh.rows import gather_rows

BITS = 26
"""Of a digit: 2**27 of them are exact in float64, and 2**37 in int64."""
NUM_DIGITS = 3
LOWEST = -30
"""Place below which nobody looks: there float64 has no reciprocal of the unit."""
_CHUNK = {"cpu": 1 << 16}
_CHUNK_ELSEWHERE = 1 << 24


@dataclass(frozen=True, slots=True)
class DigitSums:
    """The sum of numbers that are not negative, each ``digits[0] * 2**(26 * top) + ...``."""

    top: int = LOWEST
    """The place of the first digit: it counts multiples of ``2**(26 * top)``."""
    digits: tuple[int, ...] = (0,) * NUM_DIGITS
    special: float = 0.0
    """Infinity or not-a-number, which the sum is then."""

    def __add__(self, other: DigitSums) -> DigitSums:
        """Return the sum of all numbers of both, the same in whatever order sums are added."""
        top = max(self.top, other.top)
        digits = [
            sum(one.digits[i - (top - one.top)] for one in (self, other) if i >= top - one.top)
            for i in range(NUM_DIGITS)
        ]
        return DigitSums(top, tuple(digits), self.special + other.special)

    def value(self) -> float:
        """Return the sum, rounded once.

        >>> (digits_of([torch.tensor([3.0])], 2) + digits_of([torch.ones(5)], 2)).value()
        14.0
        """
        if self.special:
            return self.special
        total = sum(
            Fraction(digit) * Fraction(2) ** (BITS * (self.top - i))
            for i, digit in enumerate(self.digits)
        )
        try:
            return float(total)
        except OverflowError:
            return math.inf


def digits_of(tensors: Sequence[Tensor], power: int) -> DigitSums:
    """Return the sum of absolute values of all elements, or of their squares."""
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not tensors:
        return DigitSums()
    device = tensors[0].device
    largest = torch.stack([tensor.abs().amax().double().to(device) for tensor in tensors])
    most = float(largest.amax().item())
    most = most * most if power == 2 else most
    if not math.isfinite(most):
        return DigitSums(special=most)
    if most == 0:
        return DigitSums()
    top = max(-(-math.frexp(most)[1] // BITS) - 1, LOWEST)
    sums = torch.zeros(NUM_DIGITS, dtype=torch.int64, device=device)
    for chunk in _chunks(tensors):
        rest = chunk.to(torch.float64, copy=True)
        rest = rest.square_() if power == 2 else rest.abs_()
        rest.mul_(2.0 ** (-BITS * top))
        for i in range(NUM_DIGITS):
            digit = rest.trunc()
            sums[i] += digit.sum().to(device=device, dtype=torch.int64)
            rest.sub_(digit).mul_(2.0**BITS)
    return DigitSums(top, tuple(sums.tolist()))


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        size = _CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE)
        yield from tensor.reshape(-1).split(size)


def largest_of(tensors: Sequence[Tensor]) -> float:
    """Return the largest absolute value; not-a-number if there is one."""
    found = [float(tensor.detach().abs().amax().item()) for tensor in tensors if tensor.numel()]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def norm(tensors: Sequence[Tensor], norm_type: float, mesh: DeviceMesh) -> float:
    """Return the norm of all elements of all ranks; every rank of the mesh has to call.

    ``tensors`` are what this rank contributes: no element may be given by two ranks.
    """
    if norm_type == math.inf:
        bits = [_bits(largest_of(tensors))]
        values = [_number(row[0]) for row in gather_rows(bits, mesh).values()]
        return math.nan if any(map(math.isnan, values)) else max(values)
    own = digits_of(tensors, int(norm_type))
    total = DigitSums()
    for top, special, *digits in gather_rows(
        [own.top, _bits(own.special), *own.digits], mesh
    ).values():
        total += DigitSums(top, tuple(digits), _number(special))
    return math.sqrt(total.value()) if norm_type == 2 else total.value()


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float64, device="cpu").view(torch.int64).item())


def _number(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int64, device="cpu").view(torch.float64).item())
