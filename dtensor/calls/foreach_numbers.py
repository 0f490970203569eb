"""Foreach operators with numbers, on the CPU: a number becomes a tensor once and not per element.

Torch's loop over the list wraps the number, and casts it, anew for each of its elements, which
takes four times as long as the rest. The kernel is the same, and so are the results, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.schemas import Op, base_name
from ..tensor.wrapper import Wrapper
from ..torch_private import overload_of
from .direct import direct

aten = torch.ops.aten

_BY_TENSOR: dict[str, Op] = {
    "_foreach_add": aten._foreach_add.List,
    "_foreach_add_": aten._foreach_add_.List,
    "_foreach_mul": aten._foreach_mul.List,
    "_foreach_mul_": aten._foreach_mul_.List,
    "_foreach_div": aten._foreach_div.List,
    "_foreach_div_": aten._foreach_div_.List,
}
"""Operators that take a list of tensors, too."""

_BY_NUMBER: dict[Op, Op] = {
    aten._foreach_addcdiv.ScalarList: aten._foreach_addcdiv.Scalar,
    aten._foreach_addcdiv_.ScalarList: aten._foreach_addcdiv_.Scalar,
    aten._foreach_addcmul.ScalarList: aten._foreach_addcmul.Scalar,
    aten._foreach_addcmul_.ScalarList: aten._foreach_addcmul_.Scalar,
}
"""Operators with a number per element, and those with one for all, which unpack only that."""

_DTYPES = (torch.float32, torch.float64)
"""In others a kernel computes with more digits of the number than the tensor would have."""


def with_one_number(op: Op, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return what does the same as ``op`` on local lists, soonest where all its numbers are one."""
    has_each = overload_of(op) == "ScalarList"
    by_tensor = _BY_TENSOR.get(base_name(op)) if has_each or overload_of(op) == "Scalar" else None
    by_number = _BY_NUMBER.get(op)
    if by_tensor is None and by_number is None:
        return None
    first: Wrapper = args[0][0]
    dtype, numbers = first.dtype, args[-1] if has_each else [args[-1]]
    if dtype not in _DTYPES or any(t.dtype != dtype or not t.is_cpu for t in args[0]):
        return None
    if any(isinstance(number, complex) for number in numbers):  # the results are complex
        return None
    each, run = direct(op, args), _with_tensor(by_tensor, dtype) if by_tensor else None
    if run is None:
        run = direct(by_number, (*args[:-1], numbers[0])) if by_number else each
    return _unless_equal(run, each) if has_each else run


def _with_tensor(op: Op, dtype: torch.dtype) -> Callable[..., Any]:
    example = [torch.zeros((), dtype=dtype)]
    run = direct(op, (example, example))

    def call(tensors: list[Tensor], number: float) -> Any:
        return run(tensors, [torch.tensor(number, dtype=dtype)] * len(tensors))

    return call


def _unless_equal(run: Callable[..., Any], each: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives ``run`` one number for a list of equal ones, and other lists to ``each``.

    Zeros are equal and yet may have two signs.
    """

    def call(*args: Any) -> Any:
        *tensors, numbers = args
        first = numbers[0]
        if first and numbers.count(first) == len(numbers):
            return run(*tensors, first)
        return each(*args)

    return call
