"""Random numbers whose parameters are tensors, each element drawn where its parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import UnsupportedOp

from ..random.counter_rng import Words, fill
from ..random.draws import draws_of
from ..random.parameter_samplers import binomial as binomial_sampler
from ..random.parameter_samplers import poisson as poisson_sampler
from ..random.parameter_samplers import standard_gamma as gamma_sampler
from ..tensor.schemas import Op
from ..torch_private import has_no_values
from .engine.primitives import on_locals, reduced
from .engine.table import decomposition
from .random import refuse_generator

aten = torch.ops.aten


@decomposition(aten.poisson.default)
def poisson(rate: Tensor, generator: Any = None) -> Tensor:
    """Return counts of events that come at the rates that are given."""
    return _sampled(aten.poisson.default, generator, _checked_poisson, rate)


def _checked_poisson(words: Words, out: Tensor, rate: Tensor) -> None:
    if not (rate >= 0).all():
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    poisson_sampler(words, out, rate)


@decomposition(aten.binomial.default)
def binomial(count: Tensor, prob: Tensor, generator: Any = None) -> Tensor:
    """Return how many of ``count`` trials succeed."""
    if count.dtype != prob.dtype:
        raise RuntimeError(
            f"Found dtype {prob.dtype} but expected {count.dtype}: count and prob of binomial "
            "have the same dtype"
        )
    like = torch.zeros_like(torch.add(count, prob))
    parameters = torch.zeros_like(like).add_(count), like.add_(prob)
    return _sampled(aten.binomial.default, generator, binomial_sampler, *parameters)


@decomposition(aten._standard_gamma.default)
def standard_gamma(alpha: Tensor, generator: Any = None) -> Tensor:
    """Return samples of gamma distributions of scale 1."""
    return _sampled(aten._standard_gamma.default, generator, gamma_sampler, alpha)


@decomposition(aten._sample_dirichlet.default)
def sample_dirichlet(alpha: Tensor, generator: Any = None) -> Tensor:
    """Return positive numbers along the last dim that have the sum 1."""
    parts = _sampled(aten._sample_dirichlet.default, generator, gamma_sampler, alpha.double())
    shares = parts.div_(parts.sum(-1, keepdim=True)).to(alpha.dtype)
    return shares.clamp_(torch.finfo(alpha.dtype).tiny, 1)


def _sampled(op: Op, generator: Any, sampler: Callable[..., None], *parameters: Tensor) -> Tensor:
    """Return a sample for tensors that lie alike."""
    refuse_generator(op, generator)
    owned = [reduced(parameter) for parameter in parameters]
    spec = owned[0].spec
    if not spec.dtype.is_floating_point:
        raise UnsupportedOp(
            f"random numbers whose parameters are tensors of {spec.dtype}: only those of floating "
            "point have a sampler; convert them first, as with .float()"
        )
    keys = draws_of(spec.mesh).next(spec.mesh)

    def run(*locals_: Tensor) -> Sequence[Tensor]:
        out = torch.empty_like(locals_[0])
        if not has_no_values(out):
            for held, place in spec.parts():
                given = [local[place.slices] for local in locals_]
                fill(out[place.slices], tuple(spec.shape), held, keys, sampler, *given)
        return [out]

    return on_locals(run, owned, [spec])[0]
