"""Where operator calls come in: a kind that was seen is looked up, another one goes all the way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dtckpt.errors import UnsupportedOp

from ..ops.engine.table import DECOMPOSITIONS, RULES
from ..tensor.schemas import Op, is_foreach
from ..tensor.views.copied_view import CopiedView, refresh
from ..tensor.wrapper import Wrapper, construct, new_wrapper, refuse_part
from ..torch_private import are_proxied, has_modes, is_traced, outside_modes
from .binding import Bound, bind
from .call import Call
from .fallback import run_without_rule
from .keys import NUMBERS, by_type
from .planning import plan_of
from .quick import NOT_QUICK, remember, run_quick
from .special import run_special
from .symbols import with_numbers

_get_dtype = torch.get_default_dtype
_in_inference = torch.is_inference_mode_enabled


def dispatch(
    cls: type[Wrapper],
    op: Op,
    types: object,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return what ``op`` returns for distributed tensors of class ``cls``."""
    # Every operator comes here, so calls of one tensor, or two, or one and some values, are looked
    # up without a function call, which would take a tenth longer. Their keys are those of `key_of`,
    # or none that is known; `run_quick` finds all kinds.
    if not kwargs and args and type(first := args[0]) is cls:
        spec, count = first.spec, len(args)
        second: Any = None
        kind = key = None
        if count == 1:
            key = (id(op), _get_dtype(), RULES.generation, spec)
        elif (kind := type(second := args[1])) is cls:
            if count == 2:
                key = (id(op), _get_dtype(), RULES.generation, spec, second.spec)
        elif kind is list:
            key = (id(op), _get_dtype(), RULES.generation, spec, tuple(second), *args[2:])
        elif kind not in NUMBERS or id(op) not in by_type:
            key = (id(op), _get_dtype(), RULES.generation, spec, *args[1:])
        elif count == 2:
            key = (id(op), _get_dtype(), RULES.generation, spec, kind)
        try:
            quick = None if key is None else spec.mesh.quick_calls.get(key)
        except (TypeError, RuntimeError):  # some value cannot be hashed, or not be compared
            quick = None
        if quick is not None:
            local = first.local
            if count == 1:
                result = quick.run(local)
            elif kind is cls:
                result = quick.run(local, second.local)
            else:
                result = quick.run(local, *args[1:])
            out = quick.out
            if out is not None:
                if result.dtype is not quick.dtype or result.shape != quick.shape:
                    refuse_part(op, result, out)
                if result.storage_offset() or (not quick.is_new and _in_inference()):
                    return new_wrapper(cls, result, out, False)
                return construct(cls, result, out, False)
            return quick.finish(cls, first, local, result)
    result = run_quick(cls, op, args, kwargs)
    if result is NOT_QUICK:
        if torch.compiler.is_compiling() or _is_recorded(cls, args):
            args, kwargs = with_numbers(op, args), with_numbers(op, kwargs or {})
        result = _run(Call(cls, op, args, kwargs or {}))
    if result is None and is_foreach(op):
        # On one device these go through operators that count; copied views and autograd rely on it.
        increment_version(args[0])
    return result


def _is_recorded(cls: type[Wrapper], args: tuple[Any, ...]) -> bool:
    """Whether the first tensor stands for those of a graph.

    So it does where torch makes the views among a graph's inputs anew, with symbols for sizes;
    torch 2.11 does not say then that it compiles.
    """
    return bool(args) and type(first := args[0]) is cls and is_traced(first.local)


def _run(call: Call) -> Any:
    if has_modes() and are_proxied(call.tensors):
        raise UnsupportedOp(
            f"{call.op}: make_fx, by which torch.func.linearize works, has names for some DTensors "
            "of this call and not for others, and would write those into its graph as constants; "
            "take torch.func.jvp for linearize, and torch.compile or torch.export for make_fx"
        )
    for tensor in call.tensors:
        if isinstance(tensor, CopiedView):  # lists may be long
            refresh(tensor)
    result = run_special(call)
    if result is not NotImplemented:
        return result
    bound = bind(call)
    decomposition = DECOMPOSITIONS.get(call.op)
    if decomposition is not None and not _goes_by_rule(bound):
        result = decomposition(*call.args, **call.kwargs)
        if result is not NotImplemented:
            return result
        decomposition = None
    with outside_modes() if has_modes() else nullcontext():  # plans outlive a graph's recording
        plan = plan_of(bound)
        if plan is not None:
            remember(bound, plan)
    if plan is not None:
        return plan.run(bound)
    if decomposition is not None:  # the rule does not cover this call after all
        result = decomposition(*call.args, **call.kwargs)
        if result is not NotImplemented:
            return result
    return run_without_rule(bound)


def _goes_by_rule(bound: Bound) -> bool:
    """Whether the rule of an operator goes before its decomposition."""
    op = bound.call.op
    if op in RULES.by_users:
        return True
    return op in RULES and all(p.is_replicate() for spec in bound.specs for p in spec.placements)
