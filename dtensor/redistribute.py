"""Redistribute: the steps from one layout to another on the same mesh.

Planning is arithmetic on the two layouts and this rank's coordinate. Every step is either local or
one collective over the ranks that differ along some axes:

1. a Partial axis that the target reduces is reduced, straight into its shard where it gets one;
2. what is then sharded or replicated moves: a local slice, an all-gather along one axis, or an
   exchange of exactly the boxes that each rank lacks, along one axis if only one changes and
   over the whole mesh otherwise;
3. an axis that the target wants Partial keeps its values in one term.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dtckpt.errors import PlacementError

from .halving import HalvingDict
from .layout import Layout, format_placements
from .moves import ReduceAxis, ReduceScatterAxis, SpreadTerm, Step, plan_move
from .placement import Partial, Placement, Ragged, Replicate, Shard, reductions
from .spec import DTensorSpec

MAX_PLANS = 1024
"""Plans remembered per mesh; the older half goes when there are more."""


@dataclass(frozen=True, slots=True)
class RedistributePlan:
    """Steps that turn this rank's local tensor of one spec into that of another."""

    steps: tuple[Step, ...]

    def run(self, local: Tensor) -> Tensor:
        """Return the local tensor of the target; ``local`` itself where there is nothing to do."""
        for step in self.steps:
            local = step.run(local)
        return local

    def __str__(self) -> str:
        return "; ".join(str(step) for step in self.steps) or "nothing to do"


def redistribute_local(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Tensor:
    """Return this rank's local tensor under ``target``.

    The result never shares memory with ``local`` unless the layouts are equal, when it is
    ``local``. Every rank of the mesh must call.
    """
    if source is target or source.box is None or source.layout == target.layout:
        return local
    return plan_redistribute(source, target).run(local)


def plan_redistribute(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    """Return the plan from one spec to another of the same mesh and shape, remembered."""
    plans = source.mesh.cache("redistribute_plans", _Plans)
    plan = plans.get((source, target))
    if plan is None:
        plan = _plan(source, target)
        plans.put((source, target), plan)
    return plan


class _Plans(HalvingDict[tuple[DTensorSpec, DTensorSpec], RedistributePlan]):
    """Plans by their two specs."""

    def __init__(self) -> None:
        super().__init__(MAX_PLANS)


def _plan(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    mesh = source.mesh
    if mesh is not target.mesh or source.shape != target.shape:
        raise PlacementError(
            f"cannot redistribute {source} on {mesh!r} to {target} on {target.mesh!r}: "
            "mesh and shape must be the same"
        )
    require_commuting(target.placements)
    steps: list[Step] = []
    layout = _plan_reductions(source, target.layout, steps)
    wanted = replace(
        target.layout,
        placements=tuple(
            Replicate() if p.is_partial() and not layout.placements[axis].is_partial() else p
            for axis, p in enumerate(target.placements)
        ),
    )
    move = plan_move(mesh, layout, wanted)
    if move is not None:
        steps.append(move)
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Partial) and not layout.placements[axis].is_partial():
            steps.append(SpreadTerm(placement.reduce_op, mesh.get_local_rank(axis) == 0))
    return RedistributePlan(tuple(steps))


def _plan_reductions(source: DTensorSpec, target: Layout, steps: list[Step]) -> Layout:
    """Append the steps that reduce; return the layout after them."""
    layout = source.layout
    pending = [
        (axis, p)
        for axis, p in enumerate(source.placements)
        if isinstance(p, Partial) and target.placements[axis] != p
    ]
    if pending:
        require_commuting(source.placements)
    for axis, partial in pending:
        reduced = _reduced(layout, target, axis)
        peers_of = source.mesh.peers
        if reduced.placements[axis].is_replicate():
            steps.append(ReduceAxis(peers_of((axis,)), partial.reduce_op))
        else:
            steps.append(ReduceScatterAxis.plan(source.mesh, layout, reduced, axis))
        layout = reduced
    return layout


def _reduced(layout: Layout, target: Layout, axis: int) -> Layout:
    """Return the layout with ``axis`` reduced, into a shard if the target has one there."""
    wanted = target.placements[axis]
    if isinstance(wanted, Ragged) and not layout.splits[wanted.dim]:
        return _with(layout, axis, wanted)
    if not isinstance(wanted, Shard | Ragged):
        return _with(layout, axis, Replicate())
    # The new cut comes last, whatever its place in the mesh, so that each rank can make it alone.
    cuts = [s.axis for s in layout.splits[wanted.dim] if s.starts is None]
    placements = list(layout.placements)
    for order, cut_axis in enumerate([*cuts, axis]):
        placements[cut_axis] = Shard(wanted.dim, order)
    return replace(layout, placements=tuple(placements))


def _with(layout: Layout, axis: int, placement: Placement) -> Layout:
    placements = list(layout.placements)
    placements[axis] = placement
    return replace(layout, placements=tuple(placements))


def require_commuting(placements: tuple[Placement, ...]) -> None:
    """Raise PlacementError where reductions over several axes would depend on their order."""
    kinds = reductions(placements)
    if len(kinds) > 1:
        raise PlacementError(
            f"({format_placements(placements)}): {' and '.join(sorted(kinds))} do not commute, so "
            "the value is not defined; redistribute one axis before the other becomes Partial"
        )
