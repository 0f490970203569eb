"""What runs on local tensors where it is not the operator itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...tensor.schemas import Op, argument_place
from .table import LocalCall, LocalMaker, in_any_order


def with_local_shape(name: str) -> LocalMaker:
    """Return a maker that gives an operator the local output shape in place of a global one."""

    @in_any_order
    def maker(local: LocalCall) -> Callable[..., Any]:
        return with_argument(local.call.op, name, local.output_shape)

    return maker


def with_argument(op: Op, name: str, value: Any) -> Callable[..., Any]:
    """Return what runs an operator with a value in the place of one of its arguments."""
    place = argument_place(op, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if place is not None and place[0] < len(args):
            return op(*args[: place[0]], value, *args[place[0] + 1 :], **kwargs)
        return op(*args, **{**kwargs, name: value})

    return run


@in_any_order
def reshaped(local: LocalCall) -> Callable[..., Any]:
    """Return a reshape to the local output shape, for views of all kinds."""
    shape = local.output_shape
    return lambda tensor, *_, **__: tensor.reshape(shape)  # pyright: ignore[reportUnknownLambdaType]


def zeros(local: LocalCall) -> Callable[..., Any]:
    """Return what makes zeros of the local shapes of all outputs, from the arguments."""
    metas = [None if s is None else (s.local_shape, s.dtype) for s in local.outputs]

    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).device
        made = [m if m is None else torch.zeros(m[0], dtype=m[1], device=device) for m in metas]
        return made[0] if len(made) == 1 else tuple(made)

    return run


@in_any_order
def zeros_of_nothing(local: LocalCall) -> Callable[..., Any] | None:
    """Return what makes zeros where this rank's part of an input is empty, else None.

    Its outputs are then empty, or sums of nothing; many kernels refuse empty batches.
    """
    return zeros(local) if lacks_elements(local) else None


@in_any_order
def zeros_if_empty(local: LocalCall) -> Callable[..., Any] | None:
    """Return zeros where all outputs of this rank are empty.

    For operators that have something to compute where a factor is empty, as they know themselves.
    """
    made = all(spec is None or 0 in spec.local_shape for spec in local.outputs)
    return zeros_of_nothing(local) if made else None


@in_any_order
def zeros_if_some_empty(local: LocalCall) -> Callable[..., Any] | None:
    """Return zeros where some output of this rank is empty, of which kernels warn or raise."""
    is_empty = any(spec is not None and 0 in spec.local_shape for spec in local.outputs)
    return zeros(local) if is_empty else None


def lacks_elements(local: LocalCall) -> bool:
    """Whether a dim of an input is empty here although it is not empty globally."""
    return any(
        here == 0 != size
        for spec in local.inputs
        for here, size in zip(spec.local_shape, spec.shape, strict=False)
    )
