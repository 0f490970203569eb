"""Foreach operators with numbers, on the CPU: a number becomes a tensor once and not per element.

Torch's loop over the list wraps the number, and casts it, anew for each of its elements, which
takes four times as long as the rest. The kernel is the same, and so are the results, to the bit.
"""

# pyright: reportPrivateUsage=false
# The schema of an operator has no public name in torch.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .direct import called
from .schemas import Op, base_name
from .wrapper import Wrapper

aten = torch.ops.aten

_BY_TENSOR: dict[str, Callable[..., Any]] = {
    "_foreach_add": called(aten._foreach_add.List),
    "_foreach_add_": called(aten._foreach_add_.List),
    "_foreach_mul": called(aten._foreach_mul.List),
    "_foreach_mul_": called(aten._foreach_mul_.List),
    "_foreach_div": called(aten._foreach_div.List),
    "_foreach_div_": called(aten._foreach_div_.List),
}
"""Operators that take a list of tensors, too."""

_DTYPES = (torch.float32, torch.float64)
"""In others a kernel computes with more digits of the number than the tensor would have."""


def with_tensor(op: Op, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return what does the same as ``op`` on local lists, if its number may be a tensor."""
    run = _BY_TENSOR.get(base_name(op))
    if run is None or len(args) != 2 or op._overloadname not in ("Scalar", "ScalarList"):
        return None
    wrapped: list[Wrapper] = args[0]
    dtype = wrapped[0].dtype
    if dtype not in _DTYPES or any(t.dtype != dtype or not t.is_cpu for t in wrapped):
        return None

    def call(tensors: list[Tensor], number: Any) -> Any:
        if isinstance(number, list):
            if number.count(number[0]) != len(number):
                return op(tensors, number)
            number = number[0]
        return run(tensors, [torch.tensor(number, dtype=dtype)] * len(tensors))

    return call
