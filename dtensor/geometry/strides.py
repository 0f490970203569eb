"""Strides of the whole, and of a part: which those are that ranks agree on, and whether they fit.

What is made of a tensor, and by which kernel, goes by the strides of the whole, which are the same
on all ranks. A part *fits* if it can be viewed in every way in which these say that it can: dims
that can be joined there can be joined here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .box import row_major_strides

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of one rank's part."""


def part_fits(part: Part, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a part fits a whole of this shape with these strides."""
    sizes, owns = part
    if 0 in sizes:
        return True
    before, expected, least = -1, None, 0
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        size, step = sizes[dim], strides[dim]
        if shape[dim] == 1 or step == 0:
            continue
        if before < 0:
            expected = 1 if step == 1 else None
        elif step != strides[before] * shape[before]:
            expected = None
        before = dim
        if size == 1:
            continue
        own = owns[dim]
        if own == 0 or own < least or (expected is not None and own != expected):
            return False
        expected = least = own * size
    return True


def agreed_strides(parts: Collection[Part], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor of ``shape`` which all parts fit, if there are such.

    A dim in which a part has one index, or none, says nothing. Dims are ordered as in the parts,
    and can be joined if they can be in all of them. Row-major where the parts contradict each
    other.
    """
    given = [(sizes, strides) for sizes, strides in parts if 0 not in sizes]
    order = _common_order(given, len(shape))
    if order is None or 0 in shape:
        return row_major_strides(tuple(shape))
    made, step = [0] * len(shape), 1
    expected = [1] * len(given)
    for dim in reversed(order):
        here = [i for i, (sizes, _) in enumerate(given) if sizes[dim] > 1]
        steps = [given[i][1][dim] for i in here]
        if here and not any(steps):  # expanded
            continue
        if any(expected[i] != own for i, own in zip(here, steps, strict=True)):
            step *= 2  # a gap, so that the dim cannot be joined with the next
        made[dim] = step
        step *= shape[dim]
        for i, own in zip(here, steps, strict=True):
            expected[i] = own * given[i][0][dim]
    return tuple(made)


def _common_order(parts: Sequence[Part], ndim: int) -> list[int] | None:
    """Return the dims from the largest stride to the smallest; None where parts differ in that."""
    later: list[set[int]] = [set() for _ in range(ndim)]
    for sizes, strides in parts:
        dims = [dim for dim in range(ndim) if sizes[dim] > 1 and strides[dim] > 0]
        for dim in dims:
            later[dim].update(other for other in dims if strides[other] < strides[dim])
    left, order = list(range(ndim)), list[int]()
    while left:
        first = next((d for d in left if not any(d in later[other] for other in left)), None)
        if first is None:
            return None
        left.remove(first)
        order.append(first)
    return order
