"""The path of one operator call: key, prepared plan, local call, wrapped result."""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dtckpt.errors import PlacementError

from ..comm.caches import Cache
from ..ops.engine.table import ACROSS_MESHES, DECOMPOSITIONS, RULES
from ..redistribute import redistribute_local
from ..tensor.schemas import Op, is_foreach, is_pointwise
from ..tensor.wrapper import Wrapper, new_wrapper
from ..torch_private import base_of
from .binding import Binding, bind
from .fallback import run_without_rule
from .foreign import refuse_foreign
from .logs import noted_plan
from .plan import LocalPlan, make_plan
from .quick import NOT_QUICK, NUMBERS, Key, QuickCall, by_type, learn, remember, run_quick

aten = torch.ops.aten
wait_tensor = torch.ops._c10d_functional.wait_tensor.default

_get_dtype = torch.get_default_dtype

MAX_PLANS = 4096
"""Plans remembered per mesh; None stands for an operator without a rule."""

_UNKNOWN: Any = object()


def dispatch(
    cls: type[Wrapper],
    op: Op,
    types: object,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return what ``op`` returns for distributed tensors of class ``cls``."""
    # Every operator comes here: calls of one tensor, or two, or one and some values, are looked up
    # without a function call. ``run_quick`` knows all kinds.
    key = None
    if not kwargs and args and type(first := args[0]) is cls:
        spec, count = first._spec, len(args)
        second: Any = None
        kind = more = None
        if count > 1:
            second = args[1]
            kind = type(second)
            if kind is cls:
                more = second._spec
            elif kind is list:
                more = (tuple(second), *args[2:])
            elif kind in NUMBERS and id(op) in by_type:
                more = kind
            else:
                more = args[1:]
        if count < 3 or (kind is not cls and more is not kind):
            key = (id(op), spec, more, _get_dtype(), RULES.generation)
            try:
                quick: QuickCall | None = spec.mesh.quick_calls.get(key)
            except TypeError:  # some value cannot be hashed
                quick = key = None
            if quick is not None:
                local = first._local_tensor
                if count == 1:
                    result = quick.run(local)
                elif kind is cls:
                    result = quick.run(local, second._local_tensor)
                else:
                    result = quick.run(local, *args[1:])
                if quick.out is not None:
                    return new_wrapper(cls, result, quick.out, False)
                return quick.finish(cls, first, local, result)
    result = run_quick(cls, op, args, kwargs)
    if result is NOT_QUICK:
        if learn(op):
            return dispatch(cls, op, types, args, kwargs)
        result = _run_new(cls, op, args, kwargs or {}, key)
    if result is None and is_foreach(op):
        # On one device these go through operators that count; copied views and autograd rely on it.
        increment_version(args[0])
    return result


def _run_new(
    cls: type[Wrapper],
    op: Op,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    short: tuple[Any, ...] | None,
) -> Any:
    if op is wait_tensor:
        return args[0]  # waits when it is first needed
    refuse_foreign(op, args, kwargs)
    special = _SPECIAL.get(op)
    if special is not None:
        return special(*args, **kwargs)
    if op is aten.copy_.default and _is_reshaped_self(args[0], args[1]):
        return args[0]
    bound = bind(op, args, kwargs, by_type=is_pointwise(op) or is_foreach(op))
    decomposition = DECOMPOSITIONS.get(op)
    own = op in RULES.by_users or (op in RULES and _all_whole(bound))
    if decomposition is not None and not own:
        result = decomposition(*args, **kwargs)
        if result is not NotImplemented:
            return result
    plans: Cache[Key, LocalPlan | None] = bound.mesh.cache("plans", MAX_PLANS)
    key = (*bound.key, torch.get_default_dtype(), RULES.generation)
    plan = plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        plan = noted_plan(op, bound, make_plan(op, args, kwargs, bound))
        plans.put(key, plan)
    if plan is None:
        if decomposition is not None and own:  # the rule does not cover this call after all
            result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return run_without_rule(cls, op, args, kwargs, bound)
    remember(cls, op, args, kwargs, bound, plan, short)
    return plan.run(cls, args, kwargs, bound)


def _is_reshaped_self(target: Tensor, source: Tensor) -> bool:
    """Whether torch copies a view to its tensor, as ``matmul(out=)`` does for all but real memory.

    It has written through the view, so that the tensor holds the values already.
    """
    is_view = base_of(source) is target and source.numel() == target.numel()
    return is_view and source.shape != target.shape


def _all_whole(bound: Binding) -> bool:
    return all(p.is_replicate() for spec in bound.specs for p in spec.placements)


def _item(tensor: Wrapper) -> Any:
    return _whole(tensor).item()


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    same = left == right
    return bool(same.all().item())


def _is_same_size(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape


def _whole(tensor: Wrapper) -> Tensor:
    spec = tensor._spec
    if spec.box is None:
        raise PlacementError(
            f"{spec} has no values on this rank, which is not in its mesh {spec.mesh.layout_mesh}; "
            "ask for them on a rank of the mesh"
        )
    return redistribute_local(tensor._local_tensor, spec, spec.replicated())


_SPECIAL: dict[Op, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.is_same_size.default: _is_same_size,
    **ACROSS_MESHES,
}
"""Operators that return no tensor, and those on lists that are looked at as a whole."""
