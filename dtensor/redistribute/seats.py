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
from .steps import AllReduce, Collect, ReduceScatter, Slice, SpreadTerm, Step


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
        if hop.source.orders == hop.target.orders:  # what lies in one order moves by its places
            hop = hop.in_places()
        if hop.kind == "spread":
            here = _coordinate(hop.target, self.rank)
            return SpreadTerm(hop.reduce_op, all(here[axis] == 0 for axis in hop.axes))
        if hop.kind == "slice":
            return self._slice(hop)
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

    def _slice(self, hop: Hop) -> Step:
        here = _coordinate(hop.source, self.rank)
        own = hop.source.box(here)
        if not hop.target.is_dealt:
            return Slice(hop.target.box(here).relative_to(own))
        parts = hop.target.parts(here)
        places = [next(hop.source.placed(box)).relative_to(own) for box, _ in parts]
        return Collect(
            tuple(places), tuple(local for _, local in parts), hop.target.box(here).sizes
        )

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
        sends: list[list[Box]] = [[] for _ in position]
        receives: list[list[Box]] = [[] for _ in position]
        for taker, _, box in flows.sent_by(self.rank):
            sends[position[taker]].append(_local(hop.source, self.rank, box))
        for giver, _, box in flows.received_by(self.rank):
            receives[position[giver]].append(_local(hop.target, self.rank, box))
        at = hop.target.mesh.coordinate(self.rank)
        sizes = (0,) if at is None else hop.target.box(at).sizes
        return Exchange(
            boxes=BoxExchange.prepare(peers, sends, receives, sizes),
            most_numel=hop.most_moved,
            in_rows=hop.moves_in_rows,
            costs=self.costs,
            device=self.device,
        )


def _local(layout: Layout, rank: int, box: Box) -> Box:
    """Return where a rank's local tensor has a box, of which it holds all in one range a dim."""
    return next(layout.placed(box)).relative_to(layout.box(_coordinate(layout, rank)))


def _coordinate(layout: Layout, rank: int) -> tuple[int, ...]:
    at = layout.mesh.coordinate(rank)
    if at is None:
        raise PlacementError(f"rank {rank} is not in mesh {layout.mesh}, which has the layout")
    return at
