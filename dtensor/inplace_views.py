"""Operators that change the shape of a tensor in place: ``t_``, ``squeeze_`` and their like."""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from dtckpt.errors import UnsupportedOp

from .copied_view import CopiedView, refuse_lost_writes
from .schemas import Op, functional_of
from .wrapper import Wrapper

# The sizes of a wrapper lie in C++, and this helper for authors of tensor subclasses is torch's one
# way to change them. Where it is missing such operators are refused.
_correct: Callable[..., Any] | None = getattr(_python_dispatch, "return_and_correct_aliasing", None)


def changes_shape(op: Op) -> bool:
    """Whether an operator gives its first argument another shape in place."""
    return torch.Tag.inplace_view in op.tags


def change_shape(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Give a distributed tensor the shape that the operator without the underscore would return.

    Raises UnsupportedOp where that is no view of this rank's memory, so that other views of the
    tensor would be left behind.
    """
    tensor = args[0]
    functional = functional_of(op)
    if _correct is None or functional is None or not isinstance(tensor, Wrapper):
        raise _refusal(op, tensor, "there is no way to do so")
    refuse_lost_writes(op, tensor)
    made = functional(*args, **kwargs)
    if isinstance(made, CopiedView):
        raise _refusal(op, tensor, "it would have to be redistributed or copied")
    _correct(op, args, dict(kwargs), tensor)
    tensor._local_tensor, tensor._spec = made._local_tensor, made._spec
    return tensor


def _refusal(op: Op, tensor: Any, reason: str) -> UnsupportedOp:
    spec = tensor._spec if isinstance(tensor, Wrapper) else "a list"
    return UnsupportedOp(
        f"{op}({spec}) changes the shape of a DTensor in place, and {reason}; assign the result of "
        "the operator without the underscore instead"
    )
