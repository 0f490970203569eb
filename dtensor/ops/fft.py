"""Fourier transforms: linear, and whole along the dims that are transformed."""

from __future__ import annotations

import torch

from .engine.dims import without
from .engine.factors import FIRST
from .engine.local_kernels import zeros_of_nothing
from .engine.rules import alike
from .engine.table import OpCall, Rule, rule

aten = torch.ops.aten


@rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def transform_rule(call: OpCall) -> Rule:
    """Real to complex, back, and complex to complex."""
    dims, _ = without(call.specs[0].ndim, *call.arg("dim"))
    return alike(call, dims, linear=FIRST, local=zeros_of_nothing)
