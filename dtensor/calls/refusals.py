"""What kernels refuse where they have elements, and a rank without any would not meet.

Kernels look at dtypes and numbers when they come to the first element: integers are divided by
zero, numbers do not fit into a dtype, a dtype has no kernel. A rank that has no elements therefore
runs the operator on small tensors of its own first, never on those of the call. They have two
elements a dim, as there is no variance of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ..ops.engine.local_kernels import lacks_elements
from ..ops.engine.table import LocalCall
from ..tensor.arguments import collect_tensors, substituted
from ..tensor.schemas import Op, is_random
from ..torch_private import has_modes, outside_modes, schema_of
from .keys import NUMBERS

_linalg: Any = torch.linalg
"""torch's stubs leave out its error class."""

_NOTHING: Any = object()


def refusing(local: LocalCall, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``; where this rank lacks elements, what raises before it as other ranks do."""
    op = local.call.op
    if op.is_view or is_random(op) or not (lacks_elements(local) or _makes_nothing(local)):
        return run
    if "SymInt" in str(schema_of(op)):
        return run  # sizes do not fit to small tensors
    shapes = [[2 if size else 0 for size in spec.shape] for spec in local.inputs]
    reads_numbers = any(_numbers([local.call.args, local.call.kwargs]))
    passed: Any = _NOTHING

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        numbers = list(_numbers([args, kwargs])) if reads_numbers else None
        if passed != numbers:
            _refuse(op, args, kwargs, shapes)
            passed = numbers
        return run(*args, **kwargs)

    return call


def _makes_nothing(local: LocalCall) -> bool:
    return any(
        here == 0 != size
        for spec in local.outputs
        if spec is not None
        for here, size in zip(spec.local_shape, spec.shape, strict=True)
    )


def _numbers(values: Any) -> Iterator[Any]:
    for value in cast("dict[str, Any]", values).values() if isinstance(values, dict) else values:
        if isinstance(value, dict | list | tuple):
            yield from _numbers(value)
        elif type(value) in NUMBERS:
            yield value


def _refuse(
    op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Sequence[Sequence[int]]
) -> None:
    """Raise what a kernel raises for any element; what depends on values or shapes passes."""
    given: list[Tensor] = []
    collect_tensors([*args, *kwargs.values()], given)
    if any(
        isinstance(number, torch.SymInt | torch.SymFloat) for number in _numbers([args, kwargs])
    ):
        return
    with outside_modes() if has_modes() else nullcontext():
        error = _met(op, args, kwargs, _filled(given, shapes, 0))
        if error is None:
            return
        if not isinstance(error, NotImplementedError):
            ones = _filled(given, shapes, 1)
            # Values decide where ones pass, and shapes where tensors without data do not.
            if _met(op, args, kwargs, ones) is None:
                return
            if _met(op, args, kwargs, [t.to("meta") for t in ones]) is not None:
                return
        raise error


def _filled(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], value: int) -> list[Tensor]:
    return [
        torch.full(shape, value, dtype=t.dtype, device=t.device)
        for t, shape in zip(tensors, shapes, strict=True)
    ]


def _met(
    op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], ones: Sequence[Tensor]
) -> RuntimeError | None:
    """Return what an operator raises for some small tensors, if it is of kernels."""
    small_args, small_kwargs = substituted(args, kwargs, ones)
    try:
        op(*small_args, **small_kwargs)
    except _linalg.LinAlgError:
        return None
    except RuntimeError as error:
        return error
    except (TypeError, ValueError, IndexError, ArithmeticError):
        return None
    return None
