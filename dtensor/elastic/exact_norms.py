"""Norms of gradients whose bits do not depend on who holds which elements.

The ranks first tell each other the largest absolute value. Powers are then cut into two digits of
32 bits, relative to that; what is left is less than 2**-64 of the largest one. Sums of digits are
whole numbers and exact in any order (the pre-rounded sums of Demmel and Nguyen, "Parallel
reproducible summation", IEEE Transactions on Computers 64 (2015)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from ..mesh.device_mesh import DeviceMesh
from ..mesh.rows import gather_floats, gather_rows

BITS = 32
"""Of a digit: 2**20 of them have an exact sum in float64, and 2**30 in int64."""
_MOST_IN_FLOAT, _MOST_IN_INT = 1 << 20, 1 << 30
_WHOLE = 1.5 * 2.0**52
"""What is added to this is rounded to a whole number, ten times as fast as by ``trunc``."""
_CPU_CHUNK = 1 << 15
"""Elements that stay in the cache of a core, with what is made of them."""


def norm(tensors: Sequence[Tensor], norm_type: float, mesh: DeviceMesh) -> float:
    """Return the norm of the elements of all ranks, 1, 2 or infinity; every rank has to call.

    ``tensors`` are what this rank contributes: no element may be given by two ranks.
    """
    given = [tensor.detach() for tensor in tensors if tensor.numel()]
    found = [row[0] for row in gather_floats([_largest(given)], mesh).values()]
    largest = math.nan if any(map(math.isnan, found)) else max(found)
    if norm_type == math.inf or largest == 0 or not math.isfinite(largest):
        return largest
    exponent, power = math.frexp(largest)[1], int(norm_type)
    rows = gather_rows(list(digits_of(given, power, exponent)), mesh)
    upper, lower = (sum(digits) for digits in zip(*rows.values(), strict=True))
    total = float(Fraction((upper << BITS) + lower, 1 << 2 * BITS))
    try:
        return math.ldexp(math.sqrt(total) if power == 2 else total, exponent)
    except OverflowError:
        return math.inf


def digits_of(tensors: Sequence[Tensor], power: int, exponent: int) -> tuple[int, int]:
    """Return the sums of both digits of all absolute values, or squares.

    The first one counts multiples of 2**-32 of the same power of ``2**exponent``, which no absolute
    value reaches.

    >>> digits_of([torch.tensor([1.0, -3.0])], 2, 2) == (10 << 28, 0)
    True
    """
    upper = lower = 0
    sums: list[Tensor] = []
    count = 0
    for chunk in _chunks(tensors):
        if count + chunk.numel() > _MOST_IN_INT:
            upper, lower = _told(upper, lower, sums)
            sums, count = [], 0
        count += chunk.numel()
        # Twice by half: one factor might be no float64.
        rest = chunk.to(torch.float64, copy=True).mul_(2.0 ** -(exponent // 2))
        rest.mul_(2.0 ** -(exponent - exponent // 2))
        rest = rest.square_() if power == 2 else rest.abs_()
        first = rest.mul_(2.0**BITS).add(_WHOLE).sub_(_WHOLE)
        second = rest.sub_(first).mul_(2.0**BITS).add_(_WHOLE).sub_(_WHOLE)
        sums.append(torch.stack([first.sum(), second.sum()]).long())
    return _told(upper, lower, sums)


def _told(upper: int, lower: int, sums: Sequence[Tensor]) -> tuple[int, int]:
    if not sums:
        return upper, lower
    more = torch.stack([one.to(sums[0].device) for one in sums]).sum(0).tolist()
    return upper + more[0], lower + more[1]


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        size = _CPU_CHUNK if tensor.device.type == "cpu" else _MOST_IN_FLOAT
        yield from tensor.reshape(-1).split(size)


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest absolute value; not-a-number if there is one."""
    if not tensors:
        return 0.0
    device = tensors[0].device
    of_each = [torch.stack(t.aminmax()).double().abs().amax().to(device) for t in tensors]
    return float(torch.stack(of_each).amax().item())
