"""Which placements the tensors of one call are tried with."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from dtckpt.dtensor import Placement, Replicate, Shard

Choice = tuple[tuple[Placement, ...], ...]
"""For every tensor its placements, one per mesh axis."""


def choices_of(ndims: Sequence[int], axes: int, limit: int, seed: int) -> list[Choice]:
    """Return up to ``limit`` choices of Replicate and Shard for tensors of so many dims.

    All of them on one axis where they are few enough. Otherwise every tensor sharded alone and all
    alike come first, and the rest is drawn with ``seed``; on several axes, where everything is
    drawn, they come from the same families.
    """
    options = [_options(ndim, axes) for ndim in ndims]
    if math.prod(len(option) for option in options) <= limit:
        return list(itertools.product(*options))
    draw = random.Random(seed)
    found: dict[Choice, None] = {}
    for choice in _regular(options, ndims, axes) if axes == 1 else ():
        found[choice] = None
    regular = list(found)
    if len(regular) > limit:
        return draw.sample(regular, limit)
    while len(found) < limit:
        found[tuple(draw.choice(option) for option in options)] = None
    return list(found)


def _options(ndim: int, axes: int) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    return list(itertools.product(kinds, repeat=axes))


def _regular(
    options: list[list[tuple[Placement, ...]]], ndims: Sequence[int], axes: int
) -> list[Choice]:
    whole = tuple(option[0] for option in options)
    alone = [
        (*whole[:index], placements, *whole[index + 1 :])
        for index, option in enumerate(options)
        for placements in option[1:]
    ]
    alike: list[Choice] = [
        tuple((Shard(dim),) * axes if dim < ndim else whole[i] for i, ndim in enumerate(ndims))
        for dim in range(max(ndims, default=0))
    ]
    return [whole, *alike, *alone]
