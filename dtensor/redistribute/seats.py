"""Seats: which step a rank takes for a hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtckpt.errors import PlacementError

from ..comm.collectives import Peers
from ..comm.costs import CostModel
from ..comm.exchanges import BoxExchange
from ..geometry.box import Box
from ..geometry.flows import Flows
from ..geometry.layout import Layout
from .hops import Hop
from .move_steps import Exchange, Gather
from .steps import AllReduce, ReduceScatter, Slice, SpreadTerm, Step


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank among those that take part in a hop."""

    rank: int
    ranks: Sequence[int]
    """Those that talk to each other, by position among the peers."""
    peers: Peers | None
    device: torch.device
    """Where the tensor of the target lies."""
    costs: CostModel

    def step(self, hop: Hop) -> Step:
        """Return what the rank does for a hop.

        Boxes come from flows, but for a slice, which is a rank's own box whole, and for reductions:
        all ranks hold terms of what each of them gets, and flows would name one of them.
        """
        if hop.kind == "spread":
            here = _coordinate(hop.target, self.rank)
            return SpreadTerm(hop.reduce_op, all(here[axis] == 0 for axis in hop.axes))
        if hop.kind == "slice":
            here = _coordinate(hop.source, self.rank)
            return Slice(hop.target.box(here).relative_to(hop.source.box(here)))
        peers = self.peers
        if peers is None:
            raise PlacementError(f"{hop}: no process group for the axes {hop.axes} was given")
        if hop.kind == "exchange":
            return self._exchange(hop, peers)
        if hop.kind == "gather":
            return self._gather(hop, peers)
        if hop.source.splits == hop.target.splits:
            return AllReduce(peers, hop.reduce_op, self.costs.few_bytes)
        own = hop.source.box(_coordinate(hop.source, self.rank))
        boxes = [hop.target.box(_coordinate(hop.target, r)).relative_to(own) for r in self.ranks]
        return ReduceScatter(peers, hop.reduce_op, tuple(boxes))

    def _gather(self, hop: Hop, peers: Peers) -> Gather:
        whole = hop.target.box(_coordinate(hop.source, self.rank))
        nothing = Box((0,) * whole.ndim, (0,) * whole.ndim)
        taken = dict(Flows(hop.source, hop.target).into(self.rank))
        boxes = [taken[r].relative_to(whole) if r in taken else nothing for r in self.ranks]
        in_rows = peers.is_in_order and hop.gathers_in_rows
        return Gather(peers, tuple(boxes), whole.sizes, in_rows, self.costs)

    def _exchange(self, hop: Hop, peers: Peers) -> Exchange:
        flows = Flows(hop.source, hop.target)
        position = {rank: i for i, rank in enumerate(self.ranks)}
        sends: list[Box | None] = [None] * len(position)
        receives: list[Box | None] = [None] * len(position)
        for taker, own, box in flows.parts_out_of(self.rank):
            sends[position[taker]] = box.relative_to(own)
        for giver, wanted, box in flows.parts_into(self.rank):
            receives[position[giver]] = box.relative_to(wanted)
        sizes = next((box.sizes for box in hop.target.held_by(self.rank)), (0,))
        return Exchange(
            boxes=BoxExchange.prepare(peers, sends, receives, sizes),
            most_numel=hop.most_moved,
            in_rows=hop.moves_in_rows,
            costs=self.costs,
            device=self.device,
        )


def _coordinate(layout: Layout, rank: int) -> tuple[int, ...]:
    at = layout.mesh.coordinate(rank)
    if at is None:
        raise PlacementError(f"rank {rank} is not in mesh {layout.mesh}, which has the layout")
    return at
