"""Layouts between two others: cut further, cut less, or along other axes.

What a route asks of layouts. Nothing moves here, and nothing is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..geometry.layout import Layout
from ..geometry.placement import Placement, Replicate, Shard
from .hops import Axes


def with_placements(layout: Layout, changes: dict[int, Placement]) -> Layout:
    """Return the layout with other placements on some axes."""
    placements = tuple(changes.get(axis, p) for axis, p in enumerate(layout.placements))
    return replace(layout, placements=placements)


def cut(layout: Layout, cuts: Sequence[tuple[int, Placement]]) -> Layout:
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


def next_cuts(
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


def sliced(layout: Layout, target: Layout) -> Layout:
    """Return the layout cut where the target cuts what every rank holds: a local slice."""
    return cut(
        layout, next_cuts(layout, target, lambda axis: layout.placements[axis].is_replicate())
    )


def scattered(layout: Layout, target: Layout, axes: Axes) -> Layout:
    """Return the layout after a reduce-scatter along ``axes``, as near to the target as it can be.

    Every rank holds the whole piece of which it gets a part, so that no cut may come before those
    that are there. One that the target has further in comes last, and moves later.
    """

    def may_cut(axis: int) -> bool:
        if _is_dealt(target, axis):  # terms are cut as they lie
            return False
        return axis in axes or layout.placements[axis].is_replicate()

    cuts = next_cuts(layout, target, may_cut)
    done = {axis for axis, _ in cuts}
    for axis in axes:
        placement = target.placements[axis]
        if axis in done:
            continue
        if isinstance(placement, Shard):
            cuts.append((axis, placement))
        else:  # what is no Shard is the first to cut its dim
            cuts.append((axis, Replicate()))
    return cut(layout, cuts)


def _is_dealt(layout: Layout, axis: int) -> bool:
    """Whether an axis gives its ranks several ranges of a dim."""
    return any(split.axis == axis and split.order for cuts in layout.splits for split in cuts)


def cuts_further(source: Layout, target: Layout) -> bool:
    """Whether the target only cuts the pieces of the source again: all is there already."""
    for old, new in zip(source.splits, target.splits, strict=True):
        if old != new and new[: len(old)] != old:
            return False
    return True


_FEW_CELLS = 64


def same_cells(source: Layout, target: Layout) -> bool:
    """Whether cuts that are described otherwise are the same, as those of even ragged pieces are.

    Not looked for among very many cells: then at worst nothing is exchanged.
    """
    for dim, (old, new) in enumerate(zip(source.splits, target.splits, strict=True)):
        if old != new:
            axes = [split.axis for split in old] == [split.axis for split in new]
            if not axes or source.orders[dim] != target.orders[dim]:
                return False
            count = source.grid[dim]
            if count > _FEW_CELLS or any(
                source.interval(dim, i) != target.interval(dim, i) for i in range(count)
            ):
                return False
    return True


def moving_axes(source: Layout, target: Layout) -> Axes:
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


def thinner(target: Layout) -> list[tuple[Layout, Axes]]:
    """Return layouts that are cut along axes on which the target replicates, and those axes.

    Ranks that want the same can each take a part of it, and then gather: what they want then
    leaves its holders fewer times.
    """
    free = [a for a in target.replica_axes if target.mesh.shape[a] > 1]
    free = [a for a in free if target.placements[a].is_replicate()]
    longest = longest_dim(target)
    if not free or longest is None:
        return []
    choices = [tuple(free)] if len(free) == 1 else [tuple(free), (free[-1],)]
    return [(cut(target, [(axis, Shard(longest)) for axis in axes]), axes) for axes in choices]


def longest_dim(layout: Layout) -> int | None:
    """Return the dim along which a cell can be cut best; None where it has one element."""
    sizes = layout.largest_cell()
    longest = max(range(len(sizes)), key=lambda dim: sizes[dim], default=None)
    return None if longest is None or sizes[longest] < 2 else longest
