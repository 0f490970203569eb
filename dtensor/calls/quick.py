"""The way of a call whose kind was seen before: one look-up, the local call, the wrapper.

What the first call of a kind finds out (``dispatch``) is remembered here under a key that is cheap
to make: specs are interned, so they count by identity, as operators do. Only calls whose tensors
are all of the very class that dispatches are remembered: none is plain, none a copied view.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.caches import remembered
from ..mesh.device_mesh import DeviceMesh
from ..ops.engine.table import RULES
from ..redistribute import RedistributePlan, plan_redistribute, run_together
from ..tensor.arguments import collect_tensors
from ..tensor.schemas import MAX_OPERATORS, Op, is_foreach, is_pointwise
from ..tensor.wrapper import Wrapper, new_wrapper
from ..torch_private import schema_of
from .binding import Binding
from .direct import called, direct
from .foreach_numbers import with_one_number
from .plan import LocalPlan

NOT_QUICK: Any = object()
"""In the place of a result: nothing is remembered."""

Key = tuple[Any, ...]

NUMBERS = frozenset({bool, int, float, complex})
_get_dtype = torch.get_default_dtype
by_type: dict[int, Op] = {}
"""Operators, by identity, whose numbers count by their type and not by their value."""


class QuickCall:
    """What a call does on this rank, when only values differ from those seen before."""

    __slots__ = ("finish", "move", "op", "out", "run")

    def __init__(
        self,
        plan: LocalPlan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        places: tuple[int, ...],
    ) -> None:
        self.op = plan.op  # kept alive, so that its identity stays its own
        self.run = plan.run_local
        if plan.run_local is plan.op:
            self.run = _fastest(plan.op, args, kwargs)
        self.move = _mover(
            [(places[index], plan_redistribute(source, t)) for index, source, t in plan.moves]
        )
        """Redistributes, among the local arguments, what has to be; None where nothing has."""
        self.out = plan.outputs[0] if _returns_one_new(plan) else None
        """The spec of the result where that is one new tensor."""

        self.finish = (
            _return_first if plan.written == (0,) and not is_foreach(plan.op) else plan.finish
        )


def _fastest(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    if kwargs:
        return called(op)
    return (with_one_number(op, args) if is_foreach(op) else None) or direct(op, args)


def _mover(plans: list[tuple[int, RedistributePlan]]) -> Callable[[list[Any]], None] | None:
    if not plans:
        return None
    if len(plans) > 1:
        return partial(run_together, plans)
    place, run = plans[0][0], plans[0][1].run

    def move(locals_: list[Any]) -> None:
        locals_[place] = run(locals_[place])

    return move


def _return_first(cls: type[Wrapper], first: Any, local: Any, result: Any) -> Any:
    del cls, local, result
    return first


def _returns_one_new(plan: LocalPlan) -> bool:
    returns = schema_of(plan.op).returns
    is_tensor = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    may_be_copy = plan.is_view and (plan.copies or plan.run_local is not plan.op)
    return is_tensor and not plan.written and not may_be_copy


def run_quick(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Any:
    """Return the result of a call of any kind that is remembered, else ``NOT_QUICK``."""
    found = _long_key(cls, op, args, kwargs)
    if found is None:
        return NOT_QUICK
    mesh, key, locals_, local_kwargs = found
    try:
        quick: QuickCall | None = mesh.quick_calls.get(key)
    except TypeError:  # an argument that cannot be hashed
        return NOT_QUICK
    if quick is None:
        return NOT_QUICK
    if quick.move is not None:
        quick.move(locals_)
    result = quick.run(*locals_, **local_kwargs)
    if quick.out is not None:
        return new_wrapper(cls, result, quick.out, False)
    return quick.finish(cls, args[0], locals_[0], result)


def _long_key(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[DeviceMesh, Key, list[Any], dict[str, Any]] | None:
    """Return mesh and key of a call, and its arguments with local tensors in them.

    A tensor adds its spec to the key, a list of tensors a tuple of specs; anything else adds its
    type, and its value if that counts. Other tensors add themselves, but such keys are only looked
    up: nothing is remembered under them.
    """
    lead: Any = args[0] if args else None
    first: Any = lead[0] if type(lead) is list and lead else lead
    if type(first) is not cls:
        return None
    typed = id(op) in by_type
    key: list[Any] = [id(op), _get_dtype(), RULES.generation]
    locals_: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is cls:
            key.append(value._spec)
            locals_.append(value._local_tensor)
        elif kind is list:
            locals_.append(_local_list(cls, value, key, typed))
        else:
            key.append(kind)
            if not (typed and kind in NUMBERS):
                key.append(value)
            locals_.append(value)
    local_kwargs: dict[str, Any] = {}
    for name, value in kwargs.items() if kwargs else ():
        kind = type(value)
        if kind is cls or kind is list:
            return None
        key.append(name)
        key.append(kind)
        if not (typed and kind in NUMBERS):
            key.append(value)
        local_kwargs[name] = value
    return first._spec.mesh, tuple(key), locals_, local_kwargs


def _local_list(cls: type[Wrapper], values: list[Any], key: list[Any], typed: bool) -> list[Any]:
    specs = [item._spec for item in values if type(item) is cls]
    if specs and len(specs) == len(values):
        key.append(tuple(specs))
        return [item._local_tensor for item in values]
    if not typed:
        key.append(tuple(values))
    elif NUMBERS.issuperset(kinds := tuple(map(type, values))):
        key.append(kinds)
    else:
        key.append(tuple([item if isinstance(item, Tensor) else type(item) for item in values]))
    return values


def learn(op: Op) -> bool:
    """Return whether an operator is new here and keys of its calls are others from now on."""
    if id(op) in by_type or not (is_pointwise(op) or is_foreach(op)):
        return False
    by_type[id(op)] = op
    return True


def remember(
    cls: type[Wrapper],
    op: Op,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    bound: Binding,
    plan: LocalPlan,
    short: Key | None,
) -> None:
    """Remember a call and its plan, if its kind can be quick, under the short key if that will do.

    A short key holds values without their types, so it is none for numbers that may be 1 or 1.0.
    """
    is_view = plan.is_view or plan.op is torch.ops.aten._unsafe_view.default
    if plan.written_back or (plan.moves and (is_view or bound.specs[0].box is None)):
        return
    if plan.moves and bound.leaves[0].is_meta:  # which needs no group, and may have none
        return
    given: list[Tensor] = []
    collect_tensors([*args, *kwargs.values()], given)
    leaves = zip(given, bound.leaves, bound.specs, strict=True)
    if not all(type(a) is cls and a is leaf and a._spec is spec for a, leaf, spec in leaves):
        return
    places = tuple(place for place, arg in enumerate(args) if isinstance(arg, Tensor))
    if plan.moves and len(places) < len(bound.leaves):
        return
    found = _long_key(cls, op, args, kwargs)
    if found is None:
        return
    mesh, key = found[:2]
    in_front = places == tuple(range(len(bound.leaves)))
    is_clear = len(places) == len(args) or not _may_confuse(op, len(args))
    if short is not None and in_front and is_clear and not plan.moves:
        key = short
    mesh.quick_calls.put(key, QuickCall(plan, args, kwargs, places))


@remembered(MAX_OPERATORS)
def _may_confuse(op: Op, count: int) -> bool:
    """Whether values may be 1, 1.0 and True, which are equal as keys, or do not count at all."""
    if id(op) in by_type:
        return count > 2
    return any("number" in str(argument.type) for argument in schema_of(op).arguments)
