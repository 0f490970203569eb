"""Categories drawn by their weights, every row where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..geometry.placement import Partial
from ..mesh.spec import spec_of
from ..random import samplers
from ..random.counter_rng import fill
from ..random.draws import draws_of
from ..tensor.wrapper import Wrapper
from ..torch_private import has_no_values
from .engine.primitives import cut_axes, on_locals, replicated
from .engine.table import decomposition
from .random import refuse_generator

aten = torch.ops.aten

MAX_CATEGORIES = 1 << 24
"""Torch's own bound."""

_MAX_SUM = 62
"""Bits of the sum of all weights of a row."""


@decomposition(aten.multinomial.default)
def multinomial(
    weights: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Return the indices of categories, for every row drawn where it lies."""
    refuse_generator(aten.multinomial.default, generator)
    _check_multinomial(weights, num_samples, replacement)
    axes = cut_axes(weights, [weights.ndim - 1])
    terms = [
        a for a, p in enumerate(cast(Wrapper, weights).spec.placements) if isinstance(p, Partial)
    ]
    rows = replicated(weights, [*axes, *terms])
    source = rows.spec
    shape = (*source.shape[:-1], num_samples)
    spec = spec_of(source.mesh, source.placements, shape, None, torch.int64)
    keys = draws_of(source.mesh).next(source.mesh)

    def run(local: Tensor) -> Sequence[Tensor]:
        if has_no_values(local):
            return [torch.empty(spec.local_shape, dtype=torch.int64, device=local.device)]
        _check_weights(local)
        if not replacement:
            race = torch.empty(local.shape, dtype=torch.float64, device=local.device)
            for held, place in source.parts():
                part = race[place.slices]
                fill(part, tuple(source.shape), held, keys, samplers.exponential())
            return [_first_ones(local, race, num_samples)]
        words = torch.empty(spec.local_shape, dtype=torch.int64, device=local.device)
        for held, place in spec.parts():
            fill(words[place.slices], shape, held, keys, samplers.positive_words)
        return [_chosen(local, words)]

    return on_locals(run, [rows], [spec])[0]


def _check_multinomial(weights: Tensor, num_samples: int, replacement: bool) -> None:
    """Raise what torch raises for the shape, the dtype and the number of samples."""
    if not weights.dtype.is_floating_point:
        raise RuntimeError(
            f"multinomial only supports floating-point dtypes for input, got: {weights.dtype}"
        )
    if weights.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    count = weights.shape[-1]
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > count:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        )
    if count > MAX_CATEGORIES:
        raise RuntimeError("number of categories cannot exceed 2^24")


def _check_weights(weights: Tensor) -> None:
    if not ((weights >= 0) & (weights < torch.inf)).all():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not (weights > 0).any(-1).all():
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


def _first_ones(weights: Tensor, race: Tensor, count: int) -> Tensor:
    """Return which categories come first, where each takes a random time over its weight.

    Those without a weight come last, in their order.
    """
    speed = weights.double().div(race)
    if count == 1:
        return speed.argmax(-1, keepdim=True)
    if ((weights > 0).sum(-1) < count).any():
        return speed.sort(dim=-1, descending=True, stable=True).indices.narrow(-1, 0, count).clone()
    return speed.topk(count, -1).indices


def _chosen(weights: Tensor, words: Tensor) -> Tensor:
    """Return the categories at random places of the sum of all weights.

    Weights become whole numbers first, so that sums do not depend on their order.
    """
    units = 2.0 ** (_MAX_SUM - weights.shape[-1].bit_length())
    exact = weights.double()
    whole = exact.div(exact.amax(-1, keepdim=True)).mul_(units).long()
    whole = torch.where(weights > 0, whole.clamp_(min=1), 0)
    ends = whole.cumsum(-1)
    places = samplers.share(words, ends[..., -1:])
    return torch.searchsorted(ends, places, right=True)
