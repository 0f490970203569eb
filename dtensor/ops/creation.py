"""New tensors in the likeness of another: they need its layout and not its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .engine.dims import all_dims
from .engine.factors import Dims, Factors
from .engine.forms import operators
from .engine.local_kernels import with_local_shape
from .engine.table import LocalCall, LocalMaker, OpCall, Rule, rule

aten = torch.ops.aten


@rule(*operators(aten, "empty_like zeros_like ones_like full_like"))
def like_rule(call: OpCall) -> Rule:
    """The same shape: the same layout, with Replicate for Partial."""
    return _following(call)


@rule(*operators(aten, "new_empty new_zeros new_ones new_full"))
def new_rule(call: OpCall) -> Rule:
    """A given shape: the layout of the other tensor where that has this shape."""
    return _following(call, with_local_shape("size"))


@rule(aten.new_empty_strided.default)
def new_strided_rule(call: OpCall) -> Rule:
    """A given shape and strides; local memory is contiguous."""

    def maker(local: LocalCall) -> Callable[..., Any]:
        shape = local.output_shape

        def run(tensor: Tensor, size: Any, stride: Any, **kwargs: Any) -> Tensor:
            del size, stride
            return tensor.new_empty(shape, **kwargs)

        return run

    return _following(call, maker)


def _following(call: OpCall, local: LocalMaker | None = None) -> Rule:
    source, shape = call.specs[0], call.output_shape
    same = source.shape == shape
    dims: Dims = all_dims(source.ndim) if same else (None,) * source.ndim
    out: Dims = dims if same else (None,) * len(shape)
    return Factors(call, (dims,), (out,), ignores_values=True, local=local)
