"""Fourier transforms: linear, and whole along the dims that are transformed."""

from __future__ import annotations

import torch

from .engine.factors import Dim, Dims, Factors
from .engine.local_kernels import zeros_of_nothing
from .engine.table import OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def transform(call: OpCall) -> Rule:
    """Real to complex, back, and complex to complex."""
    ndim = call.specs[0].ndim
    whole = {dim % max(ndim, 1) for dim in call.args[1]}
    dims: Dims = tuple(None if i in whole else Dim(i) for i in range(ndim))
    rows = Factors(call=call, inputs=(dims,), outputs=(dims,), linear=(frozenset({0}),))
    return Rule(rows=rows, local=zeros_of_nothing)
