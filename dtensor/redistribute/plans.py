"""Redistribute plans: a route as one rank takes it, remembered, and run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.caches import Cache
from ..comm.collectives import Peers
from ..comm.costs import CostModel
from ..comm.message_parts import has_own_operators, joinable
from ..comm.own_copies import own_copy
from ..comm.reductions import require_reducible
from ..comm.traffic import BY_THREAD, asking
from ..comm.transports import least_agree_bytes
from ..geometry.layout import Layout
from ..geometry.mesh import Mesh
from ..geometry.placement import Partial, Placement, format_placements
from ..graphs.calls import Run, record
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import DTensorSpec
from ..torch_private import has_modes, is_traced, outside_modes
from .hops import Hop
from .logs import logs_redistributes, note_redistribute
from .memory import agree_on_memory
from .route import Planner, Route, require_commuting
from .seats import Seat
from .steps import Absent, Bring, Step
from .union import union_of

MAX_PLANS = 1024
"""Plans remembered per mesh; the older half goes when there are more."""


@dataclass(frozen=True, slots=True)
class RedistributePlan:
    """Steps that turn this rank's local tensor of one spec into that of another."""

    source: DTensorSpec
    target: DTensorSpec
    route: Route
    steps: tuple[Step, ...]
    """As many on every rank, those of other ranks too; none where nothing moves."""
    is_nothing: bool
    """Whether the layouts are equal, and not only what every rank holds in them."""
    most_bytes: int
    """A bound of what any step takes of all ranks together."""
    is_small: bool
    """Whether no step can be so large that memory for it is agreed on."""
    only_moves: bool
    """Whether no step computes anything, so that all dtypes may be taken for integers."""
    asked: str
    """The kind of collective that it is, however it is done; "" where it is several."""

    def run(self, local: Tensor) -> Tensor:
        """Return the local tensor of the target; ``local`` itself where nothing moves."""
        if local.is_meta:
            return without_values(local, self.source, self.target)
        if not self.steps:
            return self._kept(local)
        if is_traced(local) and not self.is_local:
            return recorded([self], [local], lambda given: [self.run(given[0])])[0]
        local = self.begun(local)
        if not BY_THREAD:
            return self.ended(self._run_steps(local))
        with asking(self.asked):
            return self.ended(self._run_steps(local))

    def _run_steps(self, local: Tensor) -> Tensor:
        for step in self.steps:
            if not self.is_small:
                agree_on_memory([step], [local])
            local = step.start(local)()
        return local

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Start, and return what waits for the local tensor of the target.

        Steps that follow on communication are only local where it does: whoever waits, and when,
        has no influence on the order of collectives.
        """
        local = self.begun(local)
        # By the hops, for all ranks alike: what may be waited for later is sent in another way.
        talking = [
            i for i, hop in enumerate(self.route.hops) if hop.kind not in ("slice", "spread")
        ]
        last = max(talking, default=0)
        scope = asking(self.asked)
        with scope:
            for step in self.steps[:last]:
                local = step.start(local)()
            begun = self.steps[last].start(local, later=True)
        rest = self.steps[last + 1 :]

        def finish() -> Tensor:
            with scope:
                made = begun()
            for step in rest:
                made = step.start(made)()
            return self.ended(made)

        return finish

    def _kept(self, local: Tensor) -> Tensor:
        if not self.is_nothing and logs_redistributes():
            note_redistribute(self.source, self.target, self)
        return local

    def begun(self, local: Tensor) -> Tensor:
        """Return a local tensor as steps take it; the redistribute is logged if that is wanted.

        Raises PlacementError for one that only its class could send, or that is no part of the
        source.
        """
        source = self.source
        if type(local) is not Tensor and not self.is_local and has_own_operators(local):
            raise PlacementError(
                f"({format_placements(source.placements)}) to "
                f"({format_placements(self.target.placements)}): the local tensors are of the "
                f"subclass {type(local).__name__}, whose elements are not sent; redistribute what "
                "they consist of"
            )
        # What is sent is taken for bytes of the plan's dtype.
        if local.dtype is not source.dtype or (
            local.shape != source.local_shape and source.box is not None
        ):
            raise PlacementError(
                f"redistribute {source} -> {self.target}: the local tensor is {local.dtype} of "
                f"shape {list(local.shape)}, expected {list(source.local_shape)}; make the DTensor "
                "by from_local or distribute_tensor, which look at both"
            )
        if logs_redistributes():
            note_redistribute(source, self.target, self)
        local = local.resolve_conj().resolve_neg()  # the bytes are then the values
        return joinable(local) if self.only_moves else local

    def ended(self, made: Tensor) -> Tensor:
        """Return what the last step made in its own dtype."""
        return made if made.dtype == self.target.dtype else made.view(self.target.dtype)

    @property
    def is_local(self) -> bool:
        """Whether this rank takes its part from what it has."""
        return all(step.key is None for step in self.steps)

    def __str__(self) -> str:
        return "; ".join(str(hop) for hop in self.route.hops) or "nothing to do"


def redistribute_local(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Tensor:
    """Return this rank's local tensor under ``target``.

    Nothing that is written to the result is seen in ``local`` unless the layouts are equal, when
    it is ``local``. Every rank of both meshes must call.
    """
    if source is target or (source.box is None and target.box is None):
        return local
    if local.is_meta:
        return without_values(local, source, target)
    plan = plan_redistribute(source, target)
    made = plan.run(local)
    return own_copy(made) if made is local and not plan.is_nothing else made


def scatter_local(tensor: Tensor, source_rank: int, target: DTensorSpec) -> Tensor:
    """Return this rank's local tensor of values that one rank of the mesh has: an exchange.

    What the others pass counts for its dtype only. Every rank of the mesh must call.
    """
    mesh = target.mesh
    rank = mesh.get_rank()
    steps = mesh.cache("scatter_steps", MAX_PLANS)
    step = steps.get((source_rank, target))
    if step is None:
        held = Layout.replicated(Mesh((1,), ranks=(source_rank,)), target.shape)
        hop = Hop("exchange", held, target.layout)
        ranks, peers = mesh.layout_mesh.all_ranks(), mesh.peers(tuple(range(mesh.ndim)))
        step = Seat(rank, ranks, peers, mesh.device, mesh.cost_model()).step(hop)
        steps.put((source_rank, target), step)
    if rank == source_rank:
        local = tensor.to(mesh.device).resolve_conj().resolve_neg()
    else:
        local = torch.empty(0, dtype=tensor.dtype, device=mesh.device)
    agree_on_memory([step], [local])
    return step.start(local)()


def moves_nothing(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether other placements on the same mesh leave every rank what it holds.

    As they do where they differ along axes of one rank only.
    """
    return 1 in source.mesh.shape and not plan_redistribute(source, target).steps


def start_redistribute(
    local: Tensor, source: DTensorSpec, target: DTensorSpec
) -> Callable[[], Tensor] | None:
    """Start a ``redistribute_local`` and return what waits for it; None if nothing is sent."""
    if local.is_meta or source is target or (source.box is None and target.box is None):
        return None
    plan = plan_redistribute(source, target)
    if is_traced(local) or plan.is_local:
        return None
    return plan.start(local)


Move = tuple[DTensorSpec, DTensorSpec]

_seen_moves: ContextVar[list[Move] | None] = ContextVar("_seen_moves", default=None)


@contextmanager
def moves_without_values() -> Generator[list[Move]]:
    """Collect, within it, what would move of tensors on the meta device."""
    token = _seen_moves.set(moves := [])
    try:
        yield moves
    finally:
        _seen_moves.reset(token)


def without_values(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Tensor:
    """Return what a local tensor on the meta device becomes: nothing is sent, and nothing known.

    Raises PlacementError where values could not go there either.
    """
    _require_possible(source, target)
    if source.layout.lies_as(target.layout):
        return local
    seen = _seen_moves.get()
    if seen is not None:
        seen.append((source, target))
    return local.new_empty(target.local_shape)


def recorded(
    plans: Sequence[RedistributePlan], locals_: Sequence[Tensor], run: Run
) -> list[Tensor]:
    """Return what the plans make of traced tensors; the graph that is recorded calls ``run``."""

    def make_alike(given: list[Tensor]) -> list[Tensor]:
        targets = [plan.target for plan in plans]
        return [
            local.new_empty(target.local_shape, dtype=target.dtype, device=target.mesh.device)
            for local, target in zip(given, targets, strict=True)
        ]

    told = ", ".join(f"{plan.source} -> {plan.target}" for plan in plans)
    # By what they are: what is called keeps them alive, so no others come to have these ids.
    return record(tuple(map(id, plans)), told, locals_, run, make_alike)


def plan_redistribute(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    """Return the plan from one spec to another of the same shape, remembered."""
    plans: Cache[object, RedistributePlan] = source.mesh.cache("redistribute_plans", MAX_PLANS)
    plan = plans.get((source, target))
    if plan is None:
        with outside_modes() if has_modes() else nullcontext():  # of a graph that is recorded
            plan = _plan(source, target)
        plans.put((source, target), plan)
    return plan


def _plan(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    mesh = source.mesh
    costs = mesh.cost_model()
    same_mesh = mesh.layout_mesh == target.mesh.layout_mesh
    may_group = mesh.can_group if same_mesh else _all_can_group
    planner = Planner(source.dtype.itemsize, costs, may_group)
    route = planner.route(source.layout, target.layout)
    rank = mesh.get_rank()
    _require_possible(source, target)
    steps = [_step(hop, rank, mesh, target.mesh, costs) for hop in route.hops]
    is_here = same_mesh or not route.hops  # else exchanges end on the other device
    if is_here and mesh.device != target.mesh.device:
        steps.append(Bring(target.mesh.device))
    is_nothing = source.layout == target.layout and not steps
    # No step brings more than all of the tensor to each rank.
    num_ranks = max(mesh.size(), target.mesh.size())
    most_bytes = source.layout.numel * source.dtype.itemsize * num_ranks
    only_moves = all(hop.kind in ("slice", "gather", "exchange") for hop in route.hops)
    return RedistributePlan(
        source=source,
        target=target,
        route=route,
        steps=tuple(steps),
        is_nothing=is_nothing,
        most_bytes=most_bytes,
        is_small=most_bytes < least_agree_bytes(),
        only_moves=only_moves,
        asked=_asked_for(source, target),
    )


_ASKED = {
    ("partial", "replicate"): "all_reduce",
    ("partial", "shard"): "reduce_scatter",
    ("shard", "replicate"): "all_gather",
    ("shard", "shard"): "all_to_all",
}
"""What it is called when a placement becomes another one along a mesh dim."""


def _asked_for(source: DTensorSpec, target: DTensorSpec) -> str:
    """Return the kind of collective that a redistribute is; "" where it is several, or none."""
    if not source.mesh.same_ranks_as(target.mesh):
        return ""
    pairs = zip(source.mesh.shape, source.placements, target.placements, strict=True)
    changed = {(_group_of(old), _group_of(new)) for n, old, new in pairs if n > 1 and old != new}
    kinds = {_ASKED.get(pair, "") for pair in changed} - {""}
    return kinds.pop() if len(kinds) == 1 else ""


def _group_of(placement: Placement) -> str:
    if placement.is_shard():
        return "shard"
    return "replicate" if placement.is_replicate() else "partial"


def _require_possible(source: DTensorSpec, target: DTensorSpec) -> None:
    """Raise PlacementError for what has no values there, on all ranks and on meshes of all sizes.

    Also on those ranks that only wait for what comes after.
    """
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise PlacementError(
            f"redistribute {source} -> {target}: only the placements and the mesh may differ; cast "
            "or reshape before"
        )
    require_commuting(target.placements)
    same_mesh = source.mesh.layout_mesh == target.mesh.layout_mesh
    stays = target.placements if same_mesh else (None,) * source.mesh.ndim
    reduced = [
        placement
        for placement, then in zip(source.placements, stays, strict=True)
        if isinstance(placement, Partial) and placement != then
    ]
    if reduced:
        require_commuting(source.placements)
    for placement in reduced:
        require_reducible(source.dtype, placement.reduce_op)


def _all_can_group(axes: tuple[int, ...]) -> bool:
    """Whether ranks along axes of a mesh can have a group; others do not know what it was given."""
    return len(axes) == 1 or dist.is_initialized()


def _step(hop: Hop, rank: int, source: DeviceMesh, target: DeviceMesh, costs: CostModel) -> Step:
    """Return the step of this rank."""
    if hop.is_across:
        union = union_of(source, target)
        return Seat(rank, union.ranks, union.peers, target.device, costs).step(hop)
    mesh = source if hop.source.mesh == source.layout_mesh else target
    if mesh.get_coordinate() is None:
        return Absent()
    ranks: tuple[int, ...] = ()
    peers: Peers | None = None
    if hop.axes and hop.kind != "spread":
        ranks, peers = mesh.ranks_along(hop.axes), mesh.peers(hop.axes)
    return Seat(rank, ranks, peers, mesh.device, costs).step(hop)
