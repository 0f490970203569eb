"""The quickest callable that is a given operator: torch's own function, where it is just that.

``Tensor.add`` reaches its kernel in half the time of ``torch.ops.aten.add.Tensor``, but which
operator it stands for depends on the arguments. It is therefore called once on tensors without
data, to see whether exactly this operator arrives, with exactly these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor

from ..comm.caches import Cache
from ..tensor.arguments import collect_tensors, map_tensors, substituted
from ..tensor.schemas import Op, base_name
from ..torch_private import called, make_wrapper, no_torch_function, schema_of
from .metas import run_without_data

_found: Cache[tuple[Any, ...], Callable[..., Any]] = Cache("direct", 4096)
"""By operator and the types of its arguments."""


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
