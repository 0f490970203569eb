"""Routes: by which steps one layout turns into another. Global knowledge, the same on all ranks.

A route first reduces what the target does not keep Partial, into shards where it wants shards, so
that the rest moves less. What is then sharded or replicated moves by a slice, an all-gather, or an
exchange of exactly the boxes that each rank lacks; last, axes that are to be Partial keep their
values in one term. Where there are several ways the cost model decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dtckpt.errors import PlacementError

from ..comm.costs import CostModel
from ..geometry.layout import Layout
from ..geometry.placement import Placement, Replicate, Shard, format_placements, reductions
from .cutting import (
    cut,
    cuts_further,
    longest_dim,
    moving_axes,
    same_cells,
    scattered,
    sliced,
    thinner,
    with_placements,
)
from .estimates import hop_seconds
from .hops import Axes, Hop


@dataclass(frozen=True, slots=True)
class Route:
    """The steps from one layout to another."""

    hops: tuple[Hop, ...]
    why: str
    """Why this way and not another one; empty where there is no other."""


@dataclass(frozen=True, slots=True)
class Planner:
    """What routes of one tensor are chosen by; the same on all ranks of both meshes."""

    itemsize: int
    costs: CostModel
    may_group: Callable[[Axes], bool] = lambda _: True
    """Whether the ranks along several axes of a mesh have a process group, or can make one."""

    def route(self, source: Layout, target: Layout) -> Route:
        """Return the cheapest route between layouts of one shape.

        Raises PlacementError where the values of a layout are not defined.
        """
        require_commuting(target.placements)
        if source.mesh != target.mesh:
            return self._across(source, target)
        pending = [
            axis
            for axis, p in enumerate(source.placements)
            if p.is_partial() and target.placements[axis] != p
        ]
        if pending:
            require_commuting(source.placements)
        source, target = source.without_single_axes(), target.without_single_axes()
        pending = [axis for axis in pending if source.placements[axis].is_partial()]
        hops = list(self._reduced(source, target, pending)) if pending else []
        layout = hops[-1].target if hops else source
        spread = tuple(
            axis
            for axis, p in enumerate(target.placements)
            if p.is_partial() and not layout.placements[axis].is_partial()
        )
        bare = _bare(target, spread)
        moves, why = self._moves(layout, bare)
        return Route((*hops, *moves, *_spreads(bare, target, spread)), why)

    def _across(self, source: Layout, target: Layout) -> Route:
        if source.is_partial:
            require_commuting(source.placements)
        source, target = source.without_single_axes(), target.without_single_axes()
        if source.mesh.size == 1 and source.mesh.all_ranks() == target.mesh.all_ranks():
            return Route((), "")
        hops: list[Hop] = []
        pending = [axis for axis, p in enumerate(source.placements) if p.is_partial()]
        if pending:
            # Where it goes does not matter here, so every rank reduces a part of its own.
            wanted = _bare(source, pending)
            longest = longest_dim(wanted)
            if longest is not None:
                wanted = cut(wanted, [(axis, Shard(longest)) for axis in pending])
            hops += self._reduced(source, wanted, pending)
        layout = hops[-1].target if hops else source
        spread = tuple(axis for axis, p in enumerate(target.placements) if p.is_partial())
        bare = _bare(target, spread)
        ways = [(Hop("exchange", layout, bare),)]
        ways += [
            (Hop("exchange", layout, thin), Hop("gather", thin, bare, axes))
            for thin, axes in thinner(bare)
            if self.may_group(axes)
        ]
        best, why = self._cheapest(ways)
        return Route((*hops, *best, *_spreads(bare, target, spread)), why)

    def _reduced(self, source: Layout, target: Layout, pending: Sequence[int]) -> Iterator[Hop]:
        """Yield the steps that reduce the pending axes, into shards where the target has them."""
        layout = source
        batches = self._batches(layout, pending)
        sharded = [tuple(a for a in axes if target.placements[a].is_shard()) for axes in batches]
        scattering = [part for axes in sharded for part in self._groups(axes)]
        if not scattering:  # a slice where every rank has what the target cuts: the rest moves less
            then = sliced(layout, target)
            if then.splits != layout.splits:
                yield Hop("slice", layout, then)
                layout = then
        for axes in scattering:
            then = scattered(layout, target, axes)
            yield Hop("reduce", layout, then, axes)
            layout = then
        for axes in batches:
            rest = tuple(a for a in axes if layout.placements[a].is_partial())
            for part in self._groups(rest):
                then = _bare(layout, part)
                yield Hop("reduce", layout, then, part)
                layout = then

    def _batches(self, layout: Layout, pending: Sequence[int]) -> list[Axes]:
        """Return the axes that are reduced together: by one reduction, over ranks with a group."""
        by_op: dict[Placement, list[int]] = {}
        for axis in pending:
            by_op.setdefault(layout.placements[axis], []).append(axis)
        return [part for axes in by_op.values() for part in self._groups(tuple(axes))]

    def _groups(self, axes: Axes) -> list[Axes]:
        """Return ``axes`` as they are reduced: at once over ranks with a group, or one by one."""
        return [axes] if axes and self.may_group(axes) else [(axis,) for axis in axes]

    def _moves(self, source: Layout, target: Layout) -> tuple[tuple[Hop, ...], str]:
        """Return the steps between layouts of shards and replicas on one mesh.

        Axes that are Partial in both stay so: terms move only between ranks of the same term.
        """
        if source.splits == target.splits or same_cells(source, target):
            return (), ""
        if cuts_further(source, target):
            return (Hop("slice", source, target),), ""
        axes = moving_axes(source, target)
        has_group = self.may_group(axes)
        everyone = tuple(range(source.mesh.ndim))
        ways: list[tuple[Hop, ...]] = []
        if has_group and cuts_further(target, source) and source.orders == target.orders:
            ways.append((Hop("gather", source, target, axes),))
        ways.append((Hop("exchange", source, target, axes if has_group else everyone),))
        if self.costs.ranks_per_host:
            ways += [
                (_into(source, thin, everyone), Hop("gather", thin, target, thinned))
                for thin, thinned in thinner(target)
                if self.may_group(thinned)
            ]
        return self._cheapest(ways)

    def _cheapest(self, ways: Sequence[tuple[Hop, ...]]) -> tuple[tuple[Hop, ...], str]:
        if len(ways) == 1:
            return ways[0], ""
        seconds = [sum(hop_seconds(hop, self.itemsize, self.costs) for hop in way) for way in ways]
        best = min(range(len(ways)), key=seconds.__getitem__)
        others = ", ".join(
            f"{_listed(way)} {time * 1e6:.0f} us"
            for way, time in zip(ways, seconds, strict=True)
            if way is not ways[best]
        )
        return ways[best], f"{_listed(ways[best])} {seconds[best] * 1e6:.0f} us; {others}"


def _bare(layout: Layout, axes: Sequence[int]) -> Layout:
    """Return the layout with Replicate along some axes."""
    return with_placements(layout, {axis: Replicate() for axis in axes}) if axes else layout


def _into(source: Layout, thin: Layout, everyone: Axes) -> Hop:
    if cuts_further(source, thin):
        return Hop("slice", source, thin)
    return Hop("exchange", source, thin, everyone)


def _spreads(bare: Layout, target: Layout, axes: Axes) -> list[Hop]:
    hops: list[Hop] = []
    for axis in axes:
        then = with_placements(bare, {axis: target.placements[axis]})
        hops.append(Hop("spread", bare, then, (axis,)))
        bare = then
    return hops


def _listed(way: tuple[Hop, ...]) -> str:
    return " and ".join(hop.kind for hop in way)


def require_commuting(placements: tuple[Placement, ...]) -> None:
    """Raise PlacementError where reductions over several axes would depend on their order."""
    kinds = reductions(placements)
    if len(kinds) > 1:
        raise PlacementError(
            f"({format_placements(placements)}): {' and '.join(sorted(kinds))} do not commute, so "
            "the value is not defined; redistribute one axis before the other becomes Partial"
        )
