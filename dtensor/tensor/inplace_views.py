"""Operators that change the shape of a tensor in place: ``t_``, ``squeeze_`` and their like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import UnsupportedOp

from ..torch_private import correct_aliasing
from .autograd import placed
from .leaf_gradients import follow_leaf
from .schemas import Op, base_name, functional_of
from .views.copied_view import CopiedView, ViewCall, move_values, refuse_lost_writes
from .wrapper import Wrapper

aten = torch.ops.aten

_MAY_MOVE = frozenset({"squeeze_", "unsqueeze_", "as_strided_"})


def changes_shape(op: Op) -> bool:
    """Whether an operator gives its first argument another shape in place."""
    return torch.Tag.inplace_view in op.tags


def change_shape(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Give a distributed tensor the shape that the operator without the underscore would return.

    Where that is no view of this rank's memory, the tensor becomes a view in name only of what it
    was. Raises UnsupportedOp where it cannot.
    """
    tensor = args[0]
    functional = functional_of(op)
    if correct_aliasing is None or functional is None or not isinstance(tensor, Wrapper):
        raise _refusal(op, tensor, "there is no way to do so")
    refuse_lost_writes(op, tensor)
    made = functional(*args, **kwargs)
    if isinstance(made, CopiedView):
        if base_name(op) not in _MAY_MOVE:
            raise _refusal(op, tensor, "it would have to be redistributed or copied")
        values, spec = made.local, made.spec
        correct_aliasing(op, args, dict(kwargs), tensor)
        move_values(tensor, ViewCall(functional, args[1:], kwargs), values, spec)
        follow_leaf(tensor)
        return tensor
    correct_aliasing(op, args, dict(kwargs), tensor)
    tensor.local, tensor.spec = made.local, made.spec
    follow_leaf(tensor)
    return tensor


def resize(tensor: Wrapper, values: Tensor) -> None:
    """Give a tensor that takes results their shape, as torch does for one without elements.

    One with as many elements in another shape becomes a view of itself. Others stay as they are.
    """
    if (
        correct_aliasing is None
        or not isinstance(values, Wrapper)
        or isinstance(tensor, CopiedView)
    ):
        return
    if tensor.numel() == 0:
        made = aten.empty_like.default(
            values, dtype=tensor.dtype, memory_format=torch.contiguous_format
        )
        made = placed(made, values.spec.reduced().placements)
    elif tensor.numel() == values.numel() and tensor.is_contiguous():
        made = aten.view.default(tensor, list(values.shape))
    else:
        return
    if isinstance(made, CopiedView):
        return
    correct_aliasing(aten.resize_.default, (tensor, list(values.shape)), {}, tensor)
    tensor.local, tensor.spec = made.local, made.spec


def _refusal(op: Op, tensor: Any, reason: str) -> UnsupportedOp:
    spec = tensor.spec if isinstance(tensor, Wrapper) else "a list"
    return UnsupportedOp(
        f"{op}({spec}) changes the shape of a DTensor in place, and {reason}; assign the result of "
        "the operator without the underscore instead"
    )
