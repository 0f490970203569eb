"""The way of a call whose kind was seen before: one look-up, the local call, the wrapper.

What the first call of a kind finds out is remembered here. Only calls whose tensors are all of the
very class that dispatches are remembered: none is plain, none a copied view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..redistribute import plan_redistribute, run_together
from ..tensor.schemas import Op, is_foreach
from ..tensor.views.irregular import Doubts, keep_doubt
from ..tensor.wrapper import Wrapper, construct, new_wrapper, refuse_part
from ..torch_private import schema_of
from .binding import Bound
from .call import Call
from .fastest import fastest
from .keys import key_of
from .local_plan import LocalPlan
from .symbols import has_symbols

_in_inference = torch.is_inference_mode_enabled

_DETACH = torch.ops.aten.detach.default

NOT_QUICK: Any = object()
"""In the place of a result: nothing is remembered."""


class QuickCall:
    """What a call does on this rank, when only values differ from those seen before."""

    __slots__ = ("dtype", "finish", "is_new", "out", "run", "shape")

    def __init__(self, plan: LocalPlan, call: Call) -> None:
        run = plan.run_local
        if run is plan.op:
            run = fastest(plan.op, call.args, call.kwargs)
        self.run = _moving(plan, call, run) if plan.moves else run
        """Takes the arguments with local tensors in them."""

        self.out = plan.outputs[0] if _returns_one_new(plan) else None
        """The spec of the result where that is one new tensor."""
        self.dtype = None if self.out is None else self.out.dtype
        self.shape = None if self.out is None else torch.Size(self.out.local_shape)
        """What each local result must be: another one would be read as what it is not."""
        self.is_new = plan.run_local is plan.op and not _may_share(plan)
        """Whether a local result has memory of its own, and so is an inference tensor in that
        mode."""

        self.finish = plan.finish
        if plan.written == (0,) and not is_foreach(plan.op):
            self.finish = _return_first
        elif self.out is not None and plan.op is _DETACH:
            self.finish, self.out = _detaching(self.out), None


def _moving(plan: LocalPlan, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what redistributes those arguments of ``run`` that have to be."""
    places = [place for place, arg in enumerate(call.args) if isinstance(arg, Tensor)]
    plans = [(places[index], plan_redistribute(source, t)) for index, source, t in plan.moves]
    if len(plans) > 1:

        def run_all(*args: Any, **kwargs: Any) -> Any:
            locals_ = list(args)
            run_together(plans, locals_)
            return run(*locals_, **kwargs)

        return run_all
    place, move = plans[0][0], plans[0][1].run

    def run_one(*args: Any, **kwargs: Any) -> Any:
        locals_ = list(args)
        locals_[place] = move(locals_[place])
        return run(*locals_, **kwargs)

    return run_one


def _return_first(cls: type[Wrapper], first: Any, local: Any, result: Any) -> Any:
    del cls, local, result
    return first


def _detaching(spec: DTensorSpec) -> Callable[..., Any]:
    """Return what makes detached tensors, which have no base that could say how parts may lie."""

    def finish(cls: type[Wrapper], first: Any, local: Any, result: Any) -> Any:
        del local
        if result.storage_offset() or _in_inference():
            made = new_wrapper(cls, result, spec, False)
        else:
            made = construct(cls, result, spec, False)
        if Doubts.exist:
            keep_doubt(made, first)
        return made

    return finish


def _is_view(plan: LocalPlan) -> bool:
    return plan.view_call is not None or plan.op is torch.ops.aten._unsafe_view.default


def _may_share(plan: LocalPlan) -> bool:
    """Whether what an operator returns may be memory of its arguments."""
    return _is_view(plan) or any(v.alias_info is not None for v in schema_of(plan.op).returns)


def _returns_one_new(plan: LocalPlan) -> bool:
    returns = schema_of(plan.op).returns
    is_tensor = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    may_be_copy = plan.view_call is not None and (plan.copies or plan.run_local is not plan.op)
    return is_tensor and not plan.written and not may_be_copy


def run_quick(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Any:
    """Return the result of a call of any kind that is remembered, else ``NOT_QUICK``."""
    first = _leading(args)
    if type(first) is not cls:
        return NOT_QUICK
    key, locals_, local_kwargs = key_of(cls, op, args, kwargs)
    try:
        quick: QuickCall | None = first.spec.mesh.quick_calls.get(key)
    except (TypeError, RuntimeError):  # an argument that cannot be hashed, or not be compared
        return NOT_QUICK
    if quick is None:
        return NOT_QUICK
    result = quick.run(*locals_, **local_kwargs)
    out = quick.out
    if out is not None:
        if result.dtype is not quick.dtype or result.shape != quick.shape:
            refuse_part(op, result, out)
        if result.storage_offset() or (not quick.is_new and _in_inference()):
            return new_wrapper(cls, result, out, False)
        return construct(cls, result, out, False)
    return quick.finish(cls, args[0], locals_[0], result)


def _leading(args: tuple[Any, ...]) -> Any:
    """Return the tensor whose mesh remembers a call: the first argument, or the first in it."""
    lead = args[0] if args else None
    return lead[0] if type(lead) is list and lead else lead


def remember(bound: Bound, plan: LocalPlan) -> None:
    """Remember a call and its plan, if its kind can be quick."""
    call = bound.call
    if plan.written_back or (plan.moves and (_is_view(plan) or bound.specs[0].box is None)):
        return
    if plan.moves and bound.leaves[0].is_meta:  # which needs no group, and may have none
        return
    leaves = zip(call.tensors, bound.leaves, bound.specs, strict=True)
    if not all(type(a) is call.cls and a is leaf and a.spec is spec for a, leaf, spec in leaves):
        return
    if plan.moves and sum(isinstance(arg, Tensor) for arg in call.args) < len(bound.leaves):
        return
    first = _leading(call.args)
    if isinstance(first, Wrapper) and not has_symbols(call):
        first.spec.mesh.quick_calls.put(bound.key, QuickCall(plan, call))
