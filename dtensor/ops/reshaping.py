"""The factors of a reshape: which dims become which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .engine.factors import Dim, Dims


def reshape_dims(
    source: Sequence[int], target: Sequence[int], cut: frozenset[int] = frozenset()
) -> tuple[Dims, Dims]:
    """Return the factors of a reshape: one per smallest group of dims of equal product.

    The first dim of a group larger than 1 carries the factor, in units of what follows it. Dims of
    size 1 stand for each other. Where the target has fewer of them, one that is ``cut`` carries
    the factor of a group instead, in units of all of it: one rank has everything.

    >>> reshape_dims((4, 3, 5), (12, 5))[0]
    (Dim(factor=0, unit=3, window=None), None, Dim(factor=1, unit=1, window=None))
    >>> reshape_dims((1, 6), (6,), frozenset({0}))[0]
    (Dim(factor=0, unit=6, window=None), None)
    """
    inputs: list[Dim | None] = [None] * len(source)
    outputs: list[Dim | None] = [None] * len(target)
    if 0 in source:
        return tuple(inputs), tuple(outputs)
    ones = _matched_ones(source, target, cut)
    spare = [dim for dim in sorted(cut) if source[dim] == 1 and dim not in ones]
    factor = 0
    for lead, led, product in _groups(source, target):
        if spare and lead not in cut:
            inputs[spare.pop(0)] = Dim(factor, product)
        else:
            inputs[lead] = Dim(factor, product // source[lead])
        outputs[led] = Dim(factor, product // target[led])
        factor += 1
    for number, (one, other) in enumerate(ones.items(), factor):
        inputs[one] = outputs[other] = Dim(number)
    return tuple(inputs), tuple(outputs)


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first dim of every group in both shapes, and its product.

    Dims of size 1 are in none.
    """
    left = [dim for dim, size in enumerate(source) if size > 1]
    right = [dim for dim, size in enumerate(target) if size > 1]
    i = j = 0
    while i < len(left) and j < len(right):
        lead, led = left[i], right[j]
        product, other = source[lead], target[led]
        i, j = i + 1, j + 1
        while product != other:
            if product < other:
                product, i = product * source[left[i]], i + 1
            else:
                other, j = other * target[right[j]], j + 1
        yield lead, led, product


def _matched_ones(
    source: Sequence[int], target: Sequence[int], cut: frozenset[int]
) -> dict[int, int]:
    """Return the dims of size 1 that stay, with their places in the target; cut ones go first."""
    free = [dim for dim, size in enumerate(target) if size == 1]
    ones = sorted((d for d, size in enumerate(source) if size == 1), key=lambda d: d not in cut)
    found: dict[int, int] = {}
    for dim in ones[: len(free)]:
        found[dim] = free.pop(free.index(dim) if dim in free else 0)
    return found
