"""Random numbers whose parameters are tensors, each element drawn where its parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.errors import UnsupportedOp

from ..random.counter_rng import fill
from ..random.draws import draws_of
from ..random.parameter_samplers import binomial as binomial_sampler
from ..random.parameter_samplers import poisson as poisson_sampler
from ..random.parameter_samplers import standard_gamma as gamma_sampler
from ..torch_private import has_no_values
from .engine.primitives import on_locals, reduced
from .engine.table import decomposition
from .random import refuse_generator

aten = torch.ops.aten


@decomposition(aten.poisson.default)
def poisson(rate: Tensor, generator: Any = None) -> Tensor:
    """Return counts of events that come at the rates that are given."""
    refuse_generator(aten.poisson.default, {"generator": generator})

    def check(local: Tensor) -> None:
        if not (local >= 0).all():
            raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")

    return _sampled(poisson_sampler, check, rate)


@decomposition(aten.binomial.default)
def binomial(count: Tensor, prob: Tensor, generator: Any = None) -> Tensor:
    """Return how many of ``count`` trials succeed."""
    refuse_generator(aten.binomial.default, {"generator": generator})
    if count.dtype != prob.dtype:
        raise RuntimeError(
            f"Found dtype {prob.dtype} but expected {count.dtype}: count and prob of binomial "
            "have the same dtype"
        )
    like = torch.zeros_like(torch.add(count, prob))
    return _sampled(binomial_sampler, None, torch.zeros_like(like).add_(count), like.add_(prob))


@decomposition(aten._standard_gamma.default)
def standard_gamma(alpha: Tensor, generator: Any = None) -> Tensor:
    """Return samples of gamma distributions of scale 1."""
    refuse_generator(aten._standard_gamma.default, {"generator": generator})
    return _sampled(gamma_sampler, None, alpha)


@decomposition(aten._sample_dirichlet.default)
def sample_dirichlet(alpha: Tensor, generator: Any = None) -> Tensor:
    """Return positive numbers along the last dim that have the sum 1."""
    refuse_generator(aten._sample_dirichlet.default, {"generator": generator})
    parts = _sampled(gamma_sampler, None, alpha.double())
    shares = parts.div_(parts.sum(-1, keepdim=True)).to(alpha.dtype)
    return shares.clamp_(torch.finfo(alpha.dtype).tiny, 1)


def _sampled(
    sampler: Callable[..., None], check: Callable[[Tensor], None] | None, *parameters: Tensor
) -> Tensor:
    """Return a sample for tensors that lie alike."""
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
            for local in locals_[:1] if check else ():
                cast(Callable[[Tensor], None], check)(local)
            fill(out, tuple(spec.shape), spec.own_box(), keys, sampler, *locals_)
        return [out]

    return on_locals(run, owned, [spec])[0]
