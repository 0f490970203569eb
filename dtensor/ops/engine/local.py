"""What runs on local tensors where it is not the operator itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .table import LocalCall, LocalMaker


def with_local_shape(position: int, name: str, run: Callable[..., Any] | None = None) -> LocalMaker:
    """Return a maker that puts the local output shape in the place of a global shape argument.

    ``run`` replaces the operator, where it is given.
    """

    def maker(local: LocalCall) -> Callable[..., Any]:
        shape, function = local.output_shape, run or local.call.op

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                return function(*args[:position], shape, *args[position + 1 :], **kwargs)
            return function(*args, **{**kwargs, name: shape})

        return call

    return maker


def reshaped(local: LocalCall) -> Callable[..., Any]:
    """Return a reshape to the local output shape, for views of all kinds."""
    shape = local.output_shape
    return lambda tensor, *_, **__: tensor.reshape(shape)  # pyright: ignore[reportUnknownLambdaType]


def identity_of(reduce_op: str, dtype: torch.dtype) -> Any:
    """Return the value that changes no maximum or minimum of ``dtype``."""
    if dtype == torch.bool:
        return reduce_op == "min"
    if dtype.is_floating_point:
        return float("-inf") if reduce_op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if reduce_op == "max" else info.max
