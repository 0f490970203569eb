"""What a hop takes, by the cost model."""

from __future__ import annotations

import math

from ..comm.costs import CostModel
from ..geometry.flows import Flows
from .cutting import cuts_further
from .hops import Hop


def hop_seconds(hop: Hop, itemsize: int, costs: CostModel) -> float:
    """Return what a hop costs its busiest rank, by the model; 0 for local ones."""
    old = itemsize * math.prod(hop.source.largest_cell())
    new = itemsize * math.prod(hop.target.largest_cell())
    size = hop.num_ranks
    if hop.kind == "gather":
        # All send as much as the one that has most.
        moved = old * (size - 1)
        far = _far_gathered(hop, moved, costs)
        rounds = 1 if hop.gathers_in_rows else costs.num_rounds(old * size)
        return costs.gather(size, moved, _assembled(hop, new), far, rounds=rounds)
    if hop.kind == "exchange":
        # What a rank has already is known without looking at boxes where it has a part of the new.
        kept = old if not hop.is_across and cuts_further(hop.target, hop.source) else 0
        sent, received = max(_sent(hop, itemsize) - kept, 0), max(new - kept, 0)
        copied, far = _assembled(hop, sent + received), _far_taken(hop, itemsize, costs)
        most = hop.most_moved * itemsize
        rounds = costs.exchange_rounds(most, in_rows=hop.moves_in_rows)
        return costs.exchange(size, max(sent, received), copied, far, rounds=rounds)
    if hop.kind == "reduce":
        again = 2 if hop.source.splits == hop.target.splits else 1
        return costs.gather(size, again * old * (size - 1) // size, old)
    return 0.0


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
