"""The quickest callable that does just what a given operator does.

``Tensor.add`` reaches its kernel in half the time of ``torch.ops.aten.add.Tensor``, but which
operator it stands for depends on the arguments. It is therefore called once on tensors without
data, to see whether exactly this operator arrives, with exactly these arguments.

Foreach operators with numbers, on the CPU: a number becomes a tensor once and not per element.
Torch's loop over the list wraps the number, and casts it, anew for each of its elements, which
takes four times as long as the rest. The kernel is the same, and so are the results, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor

from ..comm.caches import Cache
from ..ops.engine.forms import operators
from ..tensor.arguments import collect_tensors, map_tensors, substituted
from ..tensor.schemas import Op, base_name, is_foreach
from ..tensor.wrapper import Wrapper
from ..torch_private import called, make_wrapper, no_torch_function, overload_of, schema_of
from .metas import run_without_data

aten = torch.ops.aten

MAX_CALLABLES = 4096

_found: Cache[tuple[Any, ...], Callable[..., Any]] = Cache("callables", MAX_CALLABLES)
"""By operator and the types of its arguments."""


def fastest(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what does the same as ``op`` for local arguments like these, and soonest."""
    if kwargs:
        return called(op)
    return (_with_one_number(op, args) if is_foreach(op) else None) or direct(op, args)


class _Seen(Tensor):
    """A tensor without data that notes the calls it takes part in, as do their results.

    No ``TorchDispatchMode`` does it: entering the first one of a process imports torch's compiler,
    which takes seconds.
    """

    __slots__ = ("calls", "meta")

    meta: Tensor
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    __torch_function__ = no_torch_function()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: list[Tensor] = []
        collect_tensors([*args, *(kwargs or {}).values()], given)
        calls = next(tensor.calls for tensor in given if isinstance(tensor, _Seen))
        calls.append((func, args, kwargs or {}))
        unwrapped = [t.meta if isinstance(t, _Seen) else t for t in given]
        meta_args, meta_kwargs = substituted(args, kwargs or {}, unwrapped)
        result = run_without_data(func, meta_args, meta_kwargs)
        return map_tensors(lambda meta: _seen(meta, calls), result)


def _seen(meta: Tensor, calls: list[Any]) -> _Seen:
    made: Any = make_wrapper(
        _Seen, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=meta.device
    )
    made.meta, made.calls = meta, calls
    return made


_RESULTS = (_Seen, list, tuple, type(None))
"""Types of results; torch's functions return some tuples by other types than operators do."""


def direct(op: Op, args: Sequence[Any]) -> Callable[..., Any]:
    """Return what does the same as ``op`` for arguments of these types, and soonest."""
    key = (op, *(_kind(arg) for arg in args))
    found = _found.get(key)
    if found is None:
        places = (Tensor, torch) if _first_name(op) == "self" else (torch,)
        candidates = [getattr(place, base_name(op), None) for place in places]
        found = next((c for c in candidates if _is_same(c, op, args)), None) or called(op)
        _found.put(key, found)
    return found


def _first_name(op: Op) -> str:
    """Return the name of the first argument; a method has that named self in front."""
    arguments = schema_of(op).arguments
    return arguments[0].name if arguments else ""


def _kind(arg: Any) -> Any:
    return (list, _kind(arg[0]) if arg else None) if isinstance(arg, list) else type(arg)


def _is_same(candidate: Any, op: Op, args: Sequence[Any]) -> bool:
    """Whether a builtin of torch calls the operator with these arguments, and nothing else."""
    if not isinstance(candidate, BuiltinFunctionType | MethodDescriptorType):
        return False
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    given = [_without_data(arg, calls) for arg in args]
    try:
        result = candidate(*given)
    except (TypeError, RuntimeError, ValueError, NotImplementedError, IndexError, Warning):
        return False  # it takes other arguments
    made: list[Tensor] = []
    collect_tensors([result], made)
    if len(calls) != 1 or type(result) not in _RESULTS or {type(t) for t in made} - {_Seen}:
        return False
    func, seen, kwargs = calls[0]
    return func is op and not kwargs and _are_same(seen, given)


def _are_same(seen: Sequence[Any], given: Sequence[Any]) -> bool:
    return len(seen) == len(given) and all(_is_one(a, b) for a, b in zip(seen, given, strict=True))


def _is_one(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return _are_same(a, b)
    return a is b if isinstance(b, Tensor) else type(a) is type(b) and a == b


def _without_data(arg: Any, calls: list[Any]) -> Any:
    if isinstance(arg, Tensor):
        meta = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
        return _seen(meta, calls)
    return [_without_data(item, calls) for item in arg] if isinstance(arg, list) else arg


_BY_TENSOR = {
    base_name(op): op
    for name in ("add", "mul", "div")
    for op in operators(aten, f"_foreach_{name}.List _foreach_{name}_.List")
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


def _with_one_number(op: Op, args: Sequence[Any]) -> Callable[..., Any] | None:
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
