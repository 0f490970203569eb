"""From a call to its plan, by the rule of its operator: made once for calls of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from logging import DEBUG
from typing import Any

import torch
from torch import Tensor

from dtckpt.logs import logger_of

from ..comm.caches import Cache
from ..geometry.layout import Layout
from ..geometry.placement import format_placements
from ..mesh.spec import DTensorSpec
from ..ops import find_rule, rule_maker
from ..ops.engine.choice import Choice, choose
from ..ops.engine.joint_failures import agreed
from ..ops.engine.primitives import Move
from ..ops.engine.table import RULES, LocalCall, OpCall, Rule
from ..ops.pointwise import pointwise_rule
from ..tensor.arguments import collect_tensors, substituted
from ..tensor.inplace_views import changes_shape
from ..tensor.schemas import Op, base_name, functional_of, is_foreach, is_in_place
from ..tensor.views.copied_view import ViewCall
from ..torch_private import schema_of
from .binding import Bound
from .finite_numbers import scaling
from .keys import NUMBERS, Key, blank
from .list_elements import elements, shared_moves
from .local_plan import LocalPlan
from .metas import Metas, output_metas
from .refused_writes import refuse_moved_overlap, refuse_other_shape, refuse_overlap
from .symbols import with_stand_ins
from .user_rules import require_local_shapes

aten = torch.ops.aten

MAX_PLANS = 4096
"""Plans remembered per mesh."""

_REFUSE_ZERO = {"floor_divide", "remainder", "fmod", "div"}
"""Operators that divide; of integers by zero they raise."""

_MIRRORED: dict[Op, Op] = {
    aten.lt.Tensor: aten.gt.Tensor,
    aten.gt.Tensor: aten.lt.Tensor,
    aten.le.Tensor: aten.ge.Tensor,
    aten.ge.Tensor: aten.le.Tensor,
    aten.eq.Tensor: aten.eq.Tensor,
    aten.ne.Tensor: aten.ne.Tensor,
}
"""Comparisons, with those that say the same of the operands in the other order."""

_UNKNOWN: Any = object()

_logger = logger_of("dtensor")


def plan_of(bound: Bound) -> LocalPlan | None:
    """Return the plan of a call by its rule, made once for its kind; None where there is no rule.

    What the operator itself refuses (shapes that do not fit) is raised here, from global shapes.
    """
    plans: Cache[Key, LocalPlan | None] = bound.mesh.cache("plans", MAX_PLANS)
    key = bound.key
    plan = plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        plan = _plan_in_order(_without_values(with_stand_ins(bound)))
        _log(bound, plan)
        plans.put(key, plan)
    return plan


def _without_values(bound: Bound) -> Bound:
    """Return a call that is all that its key knows: any other one with this key has the plan."""
    call = bound.call
    args, kwargs = blank(call.op, call.args, call.kwargs)
    return replace(bound, call=replace(call, args=args, kwargs=kwargs))


def _log(bound: Bound, plan: LocalPlan | None) -> None:
    if not _logger.isEnabledFor(DEBUG):
        return
    op, inputs = bound.call.op, ", ".join(map(str, bound.specs))
    if plan is None:
        _logger.debug("%s(%s): no rule", op, inputs)
    else:
        moves = "; ".join(f"{source} -> {target}" for _, source, target in plan.moves)
        outputs = ", ".join(str(spec) for spec in plan.outputs)
        _logger.debug("%s(%s) -> %s, redistributing %s", op, inputs, outputs, moves or "nothing")


def _plan_in_order(bound: Bound) -> LocalPlan | None:
    """Return the plan of a call; of a comparison the same in either order of its operands.

    Of ``a < b`` Python asks ``b > a`` where the class of b derives from that of a. This may be so
    on some ranks alone: those whose part of b is irregular (``tensor.views.irregular``).
    """
    call = bound.call
    other = _MIRRORED.get(call.op)
    if other is None or len(bound.specs) != 2 or not _is_before(*reversed(bound.specs)):
        return _make_plan(bound)
    mirrored = Bound(
        replace(call, op=other, args=call.args[::-1]),
        bound.mesh,
        bound.leaves[::-1],
        bound.specs[::-1],
    )
    plan = _make_plan(mirrored)
    if plan is None:
        return None
    run_local = plan.run_local

    def run(one: Tensor, two: Tensor) -> Any:
        return run_local(two, one)

    moves = tuple((1 - index, source, target) for index, source, target in plan.moves)
    return replace(plan, op=call.op, run_local=run, moves=moves)


def _is_before(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether one comes before the other by what is the same on all ranks."""

    def told(spec: DTensorSpec) -> tuple[Any, ...]:
        return format_placements(spec.placements), spec.shape, spec.stride, str(spec.dtype)

    return told(one) < told(other)


def _make_plan(bound: Bound) -> LocalPlan | None:
    op = bound.call.op
    functional = functional_of(op)
    if functional is None or rule_maker(functional) is None:
        return None
    if changes_shape(op) or _has_out(op):
        return None
    if is_in_place(op):
        refuse_overlap(bound)
    metas = output_metas(bound)
    if metas is None:
        return None
    if is_in_place(op) and not is_foreach(op):
        refuse_other_shape(op, bound.specs, metas[0])
    if is_foreach(op):
        return _foreach_plan(bound, functional, metas)
    args, kwargs = bound.call.replaced(bound.specs)
    call = OpCall(op=functional, args=args, kwargs=kwargs, specs=tuple(bound.specs), outputs=metas)
    rule = find_rule(functional, call)
    if rule is None:
        return None
    in_place = is_in_place(op)
    choice = _choose(call, rule, in_place=in_place)
    if choice is None:
        return None
    if functional in RULES.by_users:
        require_local_shapes(bound.call, choice)
    written_back = _moves(choice.inputs[:1], call.specs[:1]) if in_place else ()
    refuse_moved_overlap(op, call.specs[0], written_back)
    return LocalPlan(
        op=op,
        run_local=scaling(
            bound.call, _local_function(op, call, rule, choice), choice.inputs, choice.outputs
        ),
        moves=_moves(bound.specs, choice.inputs),
        outputs=choice.outputs,
        written=(0,) if in_place else (),
        written_back=written_back,
        view_call=ViewCall(op, bound.call.args[1:], bound.call.kwargs) if op.is_view else None,
        copies=op.is_view and _makes_terms(choice),
    )


def _has_out(op: Op) -> bool:
    """Whether the operator writes tensors that only take results: those a plan may not move."""
    return schema_of(op).is_mutable and not is_in_place(op) and not is_foreach(op)


def _makes_terms(choice: Choice) -> bool:
    """Whether an axis that was not Partial has become so: most ranks then have a zero term."""
    given = choice.inputs[0].placements
    return any(
        now.is_partial() and not before.is_partial()
        for output in choice.outputs
        if output is not None
        for before, now in zip(given, output.placements, strict=True)
    )


def _choose(call: OpCall, rule: Rule, *, in_place: bool) -> Choice | None:
    """Return the choice; that of an operator in place keeps the written tensor where it can."""
    if not in_place:
        return choose(call, rule)
    choice = choose(call, rule, call.specs[0].placements)
    if choice is not None and _writes_to(choice, call.specs[0].layout):
        return choice
    choice = choose(call, rule)
    return choice if choice is not None and _writes_to(choice, choice.inputs[0].layout) else None


def _writes_to(choice: Choice, layout: Layout) -> bool:
    """Whether the first input and output lie so, and a write to one is a write to the other."""
    output = choice.outputs[0]
    return choice.inputs[0].layout == layout and output is not None and output.layout == layout


def _moves(specs: Sequence[DTensorSpec], wanted: Sequence[DTensorSpec]) -> tuple[Move, ...]:
    return tuple(
        (index, spec, target)
        for index, (spec, target) in enumerate(zip(specs, wanted, strict=True))
        if not spec.layout.lies_as(target.layout)
    )


def _local_function(op: Op, call: OpCall, rule: Rule, choice: Choice) -> Callable[..., Any]:
    if call.specs[0].box is None and call.specs[0].mesh.has_rank:
        return _nothing(choice)
    if rule.local is not None:
        made = rule.local(LocalCall(call, choice.inputs, choice.outputs, op))
        if made is not None:
            return made
    if rule_maker(call.op) is not pointwise_rule or base_name(call.op) not in _REFUSE_ZERO:
        return op
    first = choice.outputs[0]
    if first is None or first.dtype.is_floating_point:
        return op
    if type(call.args[1]) not in NUMBERS:
        # On CPUs a zero is an error where it is; GPUs return what they like.
        is_cpu = first.mesh.device_type == "cpu"
        return agreed(op, str(op), choice.inputs, RuntimeError) if is_cpu else op
    return _with_one_element(op) if 0 in first.local_shape and 0 not in first.shape else op


def _with_one_element(op: Op) -> Callable[..., Any]:
    """Return an operator that raises where it would for an element, as on the other ranks."""
    functional = functional_of(op) or op

    def run(*args: Any, **kwargs: Any) -> Any:
        given: list[Tensor] = []
        collect_tensors(args, given)
        ones = [t.new_ones((1,) * t.ndim) for t in given]
        small_args, small_kwargs = substituted(args, kwargs, ones)
        functional(*small_args, **small_kwargs)
        return op(*args, **kwargs)

    return run


def _nothing(choice: Choice) -> Callable[..., Any]:
    """Return what runs on a rank outside of the mesh: it makes empty tensors."""

    def run(*_: Any, **__: Any) -> Any:
        made = [None if s is None else torch.empty(0, dtype=s.dtype) for s in choice.outputs]
        return made[0] if len(made) == 1 else tuple(made)

    return run


def _foreach_plan(bound: Bound, functional: Op, metas: Metas) -> LocalPlan | None:
    """Return the plan of an operator on lists: a choice per element, one call on local lists."""
    op = bound.call.op
    in_place = is_in_place(op)
    sources, targets = list(bound.specs), list(bound.specs)
    outputs: list[DTensorSpec | None] = []
    written_back: list[Move] = []
    for element in elements(bound, functional, metas):
        if element.call is None:
            outputs.append(None)
            continue
        choice = element.choose(partial(_choice_of, functional, in_place))
        if choice is None:
            return None
        if in_place:
            refuse_other_shape(op, element.call.specs, None)
            first = element.members[0]
            moved = _moves(choice.inputs[:1], element.call.specs[:1])
            refuse_moved_overlap(op, element.call.specs[0], moved)
            written_back.extend((first, computed, lies) for _, computed, lies in moved)
        for member, lies, wanted in element.inputs(choice):
            sources[member], targets[member] = lies, wanted
        outputs.extend(choice.outputs)
    return LocalPlan(
        op=op,
        run_local=scaling(bound.call, op, targets, outputs),
        moves=(*_moves(sources, targets), *shared_moves(bound)),
        outputs=tuple(outputs),
        written=tuple(range(len(metas))) if in_place else (),
        written_back=tuple(written_back),
    )


def _choice_of(functional: Op, in_place: bool, call: OpCall) -> Choice | None:
    rule = find_rule(functional, call)
    return None if rule is None else _choose(call, rule, in_place=in_place)
