"""Routes: by which steps one layout turns into another. Global knowledge, the same on all ranks.

A route first reduces what the target does not keep Partial, into shards where it wants shards, so
that the rest moves less. What is then sharded or replicated moves by a slice, an all-gather, or an
exchange of exactly the boxes that each rank lacks; last, axes that are to be Partial keep their
values in one term. Where there are several ways the cost model decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dtckpt.errors import PlacementError

from ..comm.costs import CostModel
from ..geometry.flows import Flows
from ..geometry.layout import Layout, format_placements
from ..geometry.placement import Partial, Placement, Replicate, Shard, reductions

Axes = tuple[int, ...]
Kind = Literal["slice", "reduce", "gather", "exchange", "spread"]


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a route, from one layout to another, for all ranks at once."""

    kind: Kind
    source: Layout
    target: Layout
    axes: Axes = ()
    """Axes along which ranks talk to each other; none where a step is local. An exchange between
    two meshes has none either: all of their ranks take part."""

    @property
    def is_across(self) -> bool:
        """Whether values go from one mesh to another."""
        return self.source.mesh != self.target.mesh

    @property
    def num_ranks(self) -> int:
        """Number of ranks that talk to each other; 1 where none does."""
        if self.is_across:
            return len({*self.source.mesh.all_ranks(), *self.target.mesh.all_ranks()})
        return math.prod(self.source.mesh.shape[axis] for axis in self.axes)

    @property
    def reduce_op(self) -> str:
        """What a step reduces by, or spreads terms for."""
        of = self.target if self.kind == "spread" else self.source
        return next(
            p.reduce_op
            for axis, p in enumerate(of.placements)
            if isinstance(p, Partial) and axis in self.axes
        )

    def __str__(self) -> str:
        ways = {
            "slice": "local slice",
            "gather": f"all-gather over {self.num_ranks} ranks",
            "exchange": f"exchange over {self.num_ranks} ranks",
        }
        if self.kind == "spread":
            way = f"one term of {self.reduce_op}"
        elif self.kind == "reduce":
            name = "all-reduce" if self.source.splits == self.target.splits else "reduce-scatter"
            way = f"{name}({self.reduce_op}) over {self.num_ranks} ranks"
        else:
            way = ways[self.kind]
        return f"{way} to ({format_placements(self.target.placements)})"


@dataclass(frozen=True, slots=True)
class Route:
    """The steps from one layout to another."""

    hops: tuple[Hop, ...]
    why: str
    """Why this way and not another one; empty where there is no other."""


def plan_route(
    source: Layout,
    target: Layout,
    itemsize: int,
    costs: CostModel,
    may_group: Callable[[Axes], bool] = lambda _: True,
) -> Route:
    """Return the cheapest route between layouts of one shape.

    ``may_group`` says whether the ranks along several axes of a mesh have a process group, or can
    make one, with one answer on all ranks of both meshes. Raises PlacementError where the values
    of a layout are not defined.
    """
    require_commuting(target.placements)
    if source.mesh != target.mesh:
        return _route_across(source, target, itemsize, costs, may_group)
    if any(p.is_partial() and target.placements[a] != p for a, p in enumerate(source.placements)):
        require_commuting(source.placements)
    source, target = source.without_single_axes(), target.without_single_axes()
    pending = [
        axis
        for axis, p in enumerate(source.placements)
        if isinstance(p, Partial) and target.placements[axis] != p
    ]
    hops: list[Hop] = []
    layout = source
    if pending:
        layout = _reduce(source, target, pending, may_group, hops)
    spread = tuple(
        axis
        for axis, p in enumerate(target.placements)
        if p.is_partial() and not layout.placements[axis].is_partial()
    )
    bare = _with(target, {axis: Replicate() for axis in spread}) if spread else target
    moves, why = _moves(layout, bare, itemsize, costs, may_group)
    hops += moves
    if spread:
        hops += _spreads(bare, target, spread)
    return Route(tuple(hops), why)


def _route_across(
    source: Layout,
    target: Layout,
    itemsize: int,
    costs: CostModel,
    may_group: Callable[[Axes], bool],
) -> Route:
    if source.is_partial:
        require_commuting(source.placements)
    source, target = source.without_single_axes(), target.without_single_axes()
    if source.mesh.size == 1 and source.mesh.all_ranks() == target.mesh.all_ranks():
        return Route((), "")
    hops: list[Hop] = []
    layout = source
    pending = [axis for axis, p in enumerate(source.placements) if p.is_partial()]
    if pending:
        # Where it goes does not matter here, so every rank reduces a part of its own.
        wanted = _with(source, {axis: Replicate() for axis in pending})
        longest = _longest_dim(wanted)
        if longest is not None:
            wanted = _cut(wanted, [(axis, Shard(longest)) for axis in pending])
        layout = _reduce(source, wanted, pending, may_group, hops)
    spread = tuple(axis for axis, p in enumerate(target.placements) if p.is_partial())
    bare = _with(target, {axis: Replicate() for axis in spread}) if spread else target
    ways = [(Hop("exchange", layout, bare),)]
    ways += [
        (Hop("exchange", layout, thin), Hop("gather", thin, bare, axes))
        for thin, axes in _thinner(bare)
        if may_group(axes)
    ]
    best, why = _cheapest(ways, itemsize, costs)
    hops += best
    if spread:
        hops += _spreads(bare, target, spread)
    return Route(tuple(hops), why)


def _spreads(bare: Layout, target: Layout, axes: Axes) -> list[Hop]:
    hops: list[Hop] = []
    for axis in axes:
        then = _with(bare, {axis: target.placements[axis]})
        hops.append(Hop("spread", bare, then, (axis,)))
        bare = then
    return hops


# ---- reductions


def _reduce(
    source: Layout,
    target: Layout,
    pending: Sequence[int],
    may_group: Callable[[Axes], bool],
    hops: list[Hop],
) -> Layout:
    """Append the steps that reduce the pending axes; return the layout after them."""
    layout = source
    batches = list(_batches(layout, pending, may_group))
    scattered = [
        part
        for axes in batches
        for part in _groups(tuple(a for a in axes if target.placements[a].is_shard()), may_group)
    ]
    if not scattered:
        layout = _slice(layout, target, hops)
    for axes in scattered:
        then = _scattered(layout, target, axes)
        hops.append(Hop("reduce", layout, then, axes))
        layout = then
    for axes in batches:
        rest = tuple(a for a in axes if layout.placements[a].is_partial())
        for part in _groups(rest, may_group):
            then = _with(layout, {axis: Replicate() for axis in part})
            hops.append(Hop("reduce", layout, then, part))
            layout = then
    return layout


def _batches(
    layout: Layout, pending: Sequence[int], may_group: Callable[[Axes], bool]
) -> list[Axes]:
    """Return the axes that are reduced together: by one reduction, over ranks with a group."""
    by_op: dict[Placement, list[int]] = {}
    for axis in pending:
        by_op.setdefault(layout.placements[axis], []).append(axis)
    return [part for axes in by_op.values() for part in _groups(tuple(axes), may_group)]


def _groups(axes: Axes, may_group: Callable[[Axes], bool]) -> list[Axes]:
    """Return ``axes`` as they are reduced: at once over ranks with a group, else one by one."""
    return [axes] if axes and may_group(axes) else [(axis,) for axis in axes]


def _slice(layout: Layout, target: Layout, hops: list[Hop]) -> Layout:
    """Append a local slice where the target cuts what every rank holds: the rest moves less."""
    then = _cut(
        layout, _next_cuts(layout, target, lambda axis: layout.placements[axis].is_replicate())
    )
    if then.splits != layout.splits:
        hops.append(Hop("slice", layout, then))
        return then
    return layout


def _scattered(layout: Layout, target: Layout, axes: Axes) -> Layout:
    """Return the layout after a reduce-scatter along ``axes``, as near to the target as it can be.

    Every rank holds the whole piece of which it gets a part, so that no cut may come before those
    that are there. One that the target has further in comes last, and moves later.
    """

    def may_cut(axis: int) -> bool:
        return axis in axes or layout.placements[axis].is_replicate()

    cuts = _next_cuts(layout, target, may_cut)
    done = {axis for axis, _ in cuts}
    for axis in axes:
        placement = target.placements[axis]
        if axis in done:
            continue
        if isinstance(placement, Shard):
            cuts.append((axis, placement))
        else:  # a ragged cut is the first one of its dim
            cuts.append((axis, Replicate()))
    return _cut(layout, cuts)


def _next_cuts(
    layout: Layout, target: Layout, may_cut: Callable[[int], bool]
) -> list[tuple[int, Placement]]:
    """Return the cuts of the target that follow those of the layout, as far as allowed."""
    found: list[tuple[int, Placement]] = []
    for old, new in zip(layout.splits, target.splits, strict=True):
        if new[: len(old)] == old:
            for split in new[len(old) :]:
                if not may_cut(split.axis):
                    break
                found.append((split.axis, target.placements[split.axis]))
    return found


def _cut(layout: Layout, cuts: Sequence[tuple[int, Placement]]) -> Layout:
    """Return the layout with other placements on some axes, whose cuts come last in this order."""
    placements = list(layout.placements)
    orders = [[s.axis for s in splits if s.starts is None] for splits in layout.splits]
    for axis, placement in cuts:
        placements[axis] = placement
        if isinstance(placement, Shard):
            orders[placement.dim].append(axis)
    for dim, axes in enumerate(orders):
        for order, axis in enumerate(axes):
            placements[axis] = Shard(dim, order)
    return replace(layout, placements=tuple(placements))


# ---- moves


def _moves(
    source: Layout,
    target: Layout,
    itemsize: int,
    costs: CostModel,
    may_group: Callable[[Axes], bool],
) -> tuple[tuple[Hop, ...], str]:
    """Return the steps between layouts of shards and replicas on one mesh.

    Axes that are Partial in both stay so: terms move only between ranks of the same term.
    """
    if source.splits == target.splits or _same_cells(source, target):
        return (), ""
    if _cuts_further(source, target):
        return (Hop("slice", source, target),), ""
    axes = _moving_axes(source, target)
    has_group = may_group(axes)
    everyone = tuple(range(source.mesh.ndim))
    ways: list[tuple[Hop, ...]] = []
    if has_group and _cuts_further(target, source):
        ways.append((Hop("gather", source, target, axes),))
    ways.append((Hop("exchange", source, target, axes if has_group else everyone),))
    if costs.ranks_per_host:
        ways += [
            (*_into(source, thin, everyone), Hop("gather", thin, target, thinned))
            for thin, thinned in _thinner(target)
            if may_group(thinned)
        ]
    return _cheapest(ways, itemsize, costs)


def _into(source: Layout, thin: Layout, everyone: Axes) -> tuple[Hop, ...]:
    if _cuts_further(source, thin):
        return (Hop("slice", source, thin),)
    return (Hop("exchange", source, thin, everyone),)


def _cuts_further(source: Layout, target: Layout) -> bool:
    """Whether the target only cuts the pieces of the source again: all is there already."""
    for old, new in zip(source.splits, target.splits, strict=True):
        if old != new and new[: len(old)] != old:
            return False
    return True


_FEW_CELLS = 64


def _same_cells(source: Layout, target: Layout) -> bool:
    """Whether cuts that are described otherwise are the same, as those of even ragged pieces are.

    Not looked for among very many cells: then at worst nothing is exchanged.
    """
    for dim, (old, new) in enumerate(zip(source.splits, target.splits, strict=True)):
        if old != new:
            if [split.axis for split in old] != [split.axis for split in new]:
                return False
            count = source.grid[dim]
            if count > _FEW_CELLS or any(
                source.interval(dim, i) != target.interval(dim, i) for i in range(count)
            ):
                return False
    return True


def _moving_axes(source: Layout, target: Layout) -> Axes:
    """Return the axes along which something moves: those that cut what does not stay as it is.

    Cuts that begin alike in both layouts stay, and along axes that cut nothing in the source
    every rank finds what it wants at its own index.
    """
    moving: set[int] = set()
    for old, new in zip(source.splits, target.splits, strict=True):
        if old != new:
            shared = 0
            while shared < min(len(old), len(new)) and old[shared] == new[shared]:
                shared += 1
            moving.update(split.axis for split in old[shared:])
    return tuple(sorted(moving))


def _thinner(target: Layout) -> list[tuple[Layout, Axes]]:
    """Return layouts that are cut along axes on which the target replicates, and those axes.

    Ranks that want the same can each take a part of it, and then gather: what they want then
    leaves its holders fewer times.
    """
    free = [a for a in target.replica_axes if target.mesh.shape[a] > 1]
    free = [a for a in free if target.placements[a].is_replicate()]
    longest = _longest_dim(target)
    if not free or longest is None:
        return []
    choices = [tuple(free)] if len(free) == 1 else [tuple(free), (free[-1],)]
    return [(_cut(target, [(axis, Shard(longest)) for axis in axes]), axes) for axes in choices]


def _longest_dim(layout: Layout) -> int | None:
    """Return the dim along which a cell can be cut best; None where it has one element."""
    sizes = layout.largest_cell()
    longest = max(range(len(sizes)), key=lambda dim: sizes[dim], default=None)
    return None if longest is None or sizes[longest] < 2 else longest


# ---- the choice


def _cheapest(
    ways: Sequence[tuple[Hop, ...]], itemsize: int, costs: CostModel
) -> tuple[tuple[Hop, ...], str]:
    if len(ways) == 1:
        return ways[0], ""
    seconds = [sum(hop_seconds(hop, itemsize, costs) for hop in way) for way in ways]
    best = min(range(len(ways)), key=seconds.__getitem__)
    others = ", ".join(
        f"{_listed(way)} {time * 1e6:.0f} us"
        for way, time in zip(ways, seconds, strict=True)
        if way is not ways[best]
    )
    return ways[best], f"{_listed(ways[best])} {seconds[best] * 1e6:.0f} us; {others}"


def _listed(way: tuple[Hop, ...]) -> str:
    return " and ".join(hop.kind for hop in way)


def hop_seconds(hop: Hop, itemsize: int, costs: CostModel) -> float:
    """Return what a hop costs its busiest rank, by the model; 0 for local ones."""
    old = itemsize * math.prod(hop.source.largest_cell())
    new = itemsize * math.prod(hop.target.largest_cell())
    size = hop.num_ranks
    if hop.kind == "gather":
        # All send as much as the one that has most.
        moved = old * (size - 1)
        far = _far_gathered(hop, moved, costs)
        rounds = 1 if gathers_in_rows(hop) else costs.num_rounds(old * size)
        return costs.gather(size, moved, _assembled(hop, new), far, rounds=rounds)
    if hop.kind == "exchange":
        # What a rank has already is known without looking at boxes where it has a part of the new.
        kept = old if not hop.is_across and _cuts_further(hop.target, hop.source) else 0
        sent, received = max(_sent(hop, itemsize) - kept, 0), max(new - kept, 0)
        copied, far = _assembled(hop, sent + received), _far_taken(hop, itemsize, costs)
        most = most_moved(hop) * itemsize
        rounds = costs.exchange_rounds(most, in_rows=moves_in_rows(hop))
        return costs.exchange(size, max(sent, received), copied, far, rounds=rounds)
    if hop.kind == "reduce":
        again = 2 if hop.source.splits == hop.target.splits else 1
        return costs.gather(size, again * old * (size - 1) // size, old)
    return 0.0


def most_moved(hop: Hop) -> int:
    """Return a bound of the elements that any rank sends or receives in an exchange."""
    source, target = hop.source, hop.target
    if hop.is_across:
        copies = target.num_replicas
    else:  # those that agree with the giver along axes that replicate take from it
        free = (axis for axis in target.replica_axes if axis not in source.replica_axes)
        copies = math.prod(target.mesh.shape[axis] for axis in free)
    sent = copies * math.prod(source.largest_cell())
    return max(sent, math.prod(target.largest_cell()))


def moves_in_rows(hop: Hop) -> bool:
    """Whether all that any rank sends or receives is whole rows of contiguous tensors."""
    return hop.source.splits[1:] == hop.target.splits[1:]


def gathers_in_rows(hop: Hop) -> bool:
    """Whether an all-gather joins as many rows of every rank, in the order of the ranks."""
    if not moves_in_rows(hop) or not hop.source.shape:
        return False
    cuts = hop.source.splits[0][len(hop.target.splits[0]) :]
    if tuple(cut.axis for cut in cuts) != hop.axes or any(cut.starts is not None for cut in cuts):
        return False
    return hop.source.shape[0] % hop.source.grid[0] == 0


def _sent(hop: Hop, itemsize: int) -> int:
    """Return what a rank sends in an exchange if all send alike."""
    copies = hop.target.num_replicas
    return itemsize * hop.target.numel * copies // hop.source.mesh.size


def _assembled(hop: Hop, num_bytes: int) -> int:
    """Return how much is copied to its place, or packed before: none if rows follow rows."""
    changed = [dim for dim, cuts in enumerate(hop.source.splits) if cuts != hop.target.splits[dim]]
    return 0 if changed == [0] else num_bytes


def _far_taken(hop: Hop, itemsize: int, costs: CostModel) -> int:
    """Return how much the busiest of a few ranks takes from other hosts in an exchange."""
    if not costs.ranks_per_host:
        return 0
    ranks = hop.target.mesh.all_ranks()
    flows = Flows(hop.source, hop.target)
    most = 0
    for rank in {ranks[0], ranks[len(ranks) // 2], ranks[-1]}:
        host = costs.host(rank)
        far = sum(box.numel for giver, box in flows.into(rank) if costs.host(giver) != host)
        most = max(most, far)
    return most * itemsize


def _far_gathered(hop: Hop, moved: int, costs: CostModel) -> float:
    """Return how much a rank takes from other hosts, if those of its host share it."""
    if not costs.ranks_per_host:
        return 0
    mesh = hop.source.mesh
    ranks = mesh.submesh(hop.axes, (0,) * mesh.ndim).all_ranks()
    here = sum(costs.host(rank) == costs.host(ranks[0]) for rank in ranks)
    if here == len(ranks):
        return 0
    return moved * (len(ranks) - here) / (len(ranks) - 1) / here


# ---- layouts


def _with(layout: Layout, changes: dict[int, Placement]) -> Layout:
    placements = tuple(changes.get(axis, p) for axis, p in enumerate(layout.placements))
    return replace(layout, placements=placements)


def require_commuting(placements: tuple[Placement, ...]) -> None:
    """Raise PlacementError where reductions over several axes would depend on their order."""
    kinds = reductions(placements)
    if len(kinds) > 1:
        raise PlacementError(
            f"({format_placements(placements)}): {' and '.join(sorted(kinds))} do not commute, so "
            "the value is not defined; redistribute one axis before the other becomes Partial"
        )
