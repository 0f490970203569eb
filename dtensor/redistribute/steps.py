"""The steps of a redistribute plan: a hop of a route as one rank takes part in it.

A step starts, and the function that it returns waits and gives the local tensor after it. Steps of
one ``key`` that several tensors take can go together, as one collective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.collectives import Peers, start_all_gather, to_bytes
from ..comm.costs import CostModel
from ..comm.packing import Messages, gather
from ..comm.parts import ViewPart
from ..comm.prepared import PLAIN_DTYPES, PreparedExchange
from ..comm.reductions import start_all_reduce, start_reduce_scatter
from ..geometry.box import Box
from ..geometry.flows import Flows
from ..geometry.layout import Layout
from .route import Hop, gathers_in_rows, most_moved, moves_in_rows

Result = Callable[[], Tensor]
Results = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory of a step of several ranks."""

    peers: Peers
    most_bytes: int
    """What moves, or a bound of it: alike on all of them."""
    own_bytes: tuple[int, ...]
    """What this rank has to allocate, tensor by tensor."""


class Step(ABC):
    """One step of a plan."""

    @property
    def key(self) -> Hashable:
        """What steps have in common that can go together; None for one that is local."""
        return None

    @abstractmethod
    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Start the step; the result waits for it and returns the local tensor after it.

        With ``later`` it may be called after other collectives, or never.
        """

    def needs(self, local: Tensor) -> Needs | None:
        """Return the memory that the step takes besides ``local``; None for one that is local."""
        del local
        return None

    def start_all(self, steps: Sequence[Step], locals_: Sequence[Tensor]) -> Results:
        """Start steps of this one's key together, each on its tensor."""
        results = [step.start(local) for step, local in zip(steps, locals_, strict=True)]
        return lambda: [result() for result in results]


@dataclass(frozen=True, slots=True)
class Absent(Step):
    """A step of other ranks. It counts: steps go together that are at one place in their plans."""

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Return the tensor."""
        return lambda: local


@dataclass(frozen=True, slots=True)
class Bring(Step):
    """To the same ranks' memory of another kind."""

    device: torch.device

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Return a copy there."""
        made = local.to(self.device).contiguous()
        return lambda: made


@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Every rank already holds what it wants: a local copy of a box, without communication."""

    box: Box

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Return a copy, which lets the larger tensor go."""
        made = local[self.box.slices].clone(memory_format=torch.contiguous_format)
        return lambda: made


@dataclass(frozen=True, slots=True)
class SpreadTerm(Step):
    """Replicate to Partial: values that reduce to what they were."""

    reduce_op: str
    is_first: bool

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Return the values in one term and the identity in the others, or copies in all."""
        if self.is_first or self.reduce_op not in ("sum", "product"):
            made = local.clone(memory_format=torch.contiguous_format)
        else:
            made = local.new_full(local.shape, 1 if self.reduce_op == "product" else 0)
        return lambda: made


@dataclass(frozen=True, slots=True)
class AllReduce(Step):
    """Partial to Replicate along some axes."""

    peers: Peers
    reduce_op: str
    few_bytes: int
    """As of the cost model."""

    @property
    def key(self) -> Hashable:
        """Terms of one dtype are reduced as one row of numbers."""
        return (AllReduce, self.peers, self.reduce_op, self.few_bytes)

    def needs(self, local: Tensor) -> Needs:
        """Return the memory of the result."""
        return Needs(self.peers, local.nbytes, (local.nbytes,))

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Start the reduction."""
        return start_all_reduce(local, self.reduce_op, self.peers, self.few_bytes)

    def start_all(self, steps: Sequence[Step], locals_: Sequence[Tensor]) -> Results:
        """Start the reduction of all, those of each dtype in one."""
        if len(locals_) == 1:
            return super(AllReduce, self).start_all(steps, locals_)
        rows = [(places, self.start(_flat_row(locals_, places))) for places in _by_dtype(locals_)]

        def finish() -> list[Tensor]:
            made = list(locals_)
            for places, reduced in rows:
                parts = reduced().split([locals_[i].numel() for i in places])
                for i, part in zip(places, parts, strict=True):
                    # Each in memory of its own: none is kept alive, or written, through another.
                    made[i] = part.clone().view(locals_[i].shape)
            return made

        return finish


@dataclass(frozen=True, slots=True)
class ReduceScatter(Step):
    """Partial to Shard along some axes."""

    peers: Peers
    reduce_op: str
    boxes: tuple[Box, ...]
    """What each rank gets, by position, in this rank's local coordinates."""

    @property
    def key(self) -> Hashable:
        """Terms of one dtype are reduced as one row of numbers."""
        return (ReduceScatter, self.peers, self.reduce_op)

    def needs(self, local: Tensor) -> Needs:
        """Return the memory of the terms, joined for all and received for this rank."""
        return Needs(self.peers, local.nbytes, (local.nbytes, local.nbytes))

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Start the reduction."""
        pieces = [local[box.slices] for box in self.boxes]
        return start_reduce_scatter(pieces, self.reduce_op, self.peers, later=later)

    def start_all(self, steps: Sequence[Step], locals_: Sequence[Tensor]) -> Results:
        """Start the reduction of all, those of each dtype in one."""
        if len(locals_) == 1:
            return super(ReduceScatter, self).start_all(steps, locals_)
        boxes = [step.boxes for step in steps if isinstance(step, ReduceScatter)]
        here = self.peers.position
        rows: list[tuple[list[int], Result]] = []
        for places in _by_dtype(locals_):
            pieces = [
                _flat_row([locals_[i][boxes[i][position].slices] for i in places])
                for position in range(self.peers.size)
            ]
            rows.append((places, start_reduce_scatter(pieces, self.reduce_op, self.peers)))

        def finish() -> list[Tensor]:
            made = list(locals_)
            for places, reduced in rows:
                own = [boxes[i][here] for i in places]
                parts = reduced().split([box.numel for box in own])
                for i, box, part in zip(places, own, parts, strict=True):
                    made[i] = part.clone().view(box.sizes)
            return made

        return finish


@dataclass(frozen=True, slots=True)
class Exchange(Step):
    """Any shards to any shards: each rank gets exactly the boxes that it lacks."""

    peers: Peers
    sends: tuple[Box | None, ...]
    """What goes to each rank, by position, in coordinates of the old local tensor."""
    receives: tuple[Box | None, ...]
    """What comes from each rank, in coordinates of the new local tensor."""
    kept: tuple[Box, Box] | None
    """What this rank already has: where it was and where it goes."""
    sizes: tuple[int, ...]
    """Shape of the new local tensor."""
    most_numel: int
    """The most elements that any rank sends or receives."""
    in_rows: bool
    """Whether all that any rank sends or receives is whole rows of its tensors, where those are
    contiguous."""
    costs: CostModel
    device: torch.device
    prepared: PreparedExchange
    """The same for one small tensor."""

    @property
    def key(self) -> Hashable:
        """All that goes between the same ranks goes at once."""
        return (Exchange, self.peers)

    def needs(self, local: Tensor) -> Needs:
        """Return the memory of the result and of one round."""
        most = self.most_numel * local.element_size()
        buffer = min(most, self.costs.round_bytes)
        result = math.prod(self.sizes) * local.element_size()
        return Needs(self.peers, most, (result, buffer, buffer))

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Start the exchange."""
        num_bytes = self.most_numel * local.element_size()
        is_small = num_bytes <= self.costs.round_bytes and not self.costs.is_direct(num_bytes)
        if is_small and local.dtype in PLAIN_DTYPES:
            finish = self.prepared.start(local, later=later)
            return lambda: self._placed(finish())
        results = self._start([self], [local], later=later)
        return lambda: results()[0]

    def start_all(self, steps: Sequence[Step], locals_: Sequence[Tensor]) -> Results:
        """Start the exchanges of all in one."""
        return self._start([step for step in steps if isinstance(step, Exchange)], locals_)

    def _start(
        self, steps: Sequence[Exchange], locals_: Sequence[Tensor], *, later: bool = False
    ) -> Results:
        pairs = list(zip(steps, locals_, strict=True))
        made = [step._begun(local) for step, local in pairs]
        sends: list[list[ViewPart]] = [[] for _ in self.sends]
        receives: list[list[ViewPart]] = [[] for _ in self.sends]
        for (step, local), new in zip(pairs, made, strict=True):
            for position, box in enumerate(step.sends):
                if box is not None:
                    sends[position].append(ViewPart(local[box.slices]))
            for position, box in enumerate(step.receives):
                if box is not None:
                    receives[position].append(ViewPart(new[box.slices]))
        most = sum(step.most_numel * local.element_size() for step, local in pairs)
        device = locals_[0].device
        in_rows = len(steps) == 1 and self.in_rows
        messages = Messages(sends, receives, self.peers, device)
        finish = messages.start(most, self.costs, later=later, in_rows=in_rows)

        def results() -> list[Tensor]:
            finish()
            return [step._placed(new) for step, new in zip(steps, made, strict=True)]

        return results

    def _begun(self, local: Tensor) -> Tensor:
        """Return the new local tensor with what this rank has already."""
        made = local.new_empty(self.sizes)
        if self.kept is not None:
            old, new = self.kept
            made[new.slices] = local[old.slices]
        return made

    def _placed(self, made: Tensor) -> Tensor:
        return made if made.device == self.device else made.to(self.device)


@dataclass(frozen=True, slots=True)
class Gather(Step):
    """Shard to Replicate along some axes."""

    peers: Peers
    boxes: tuple[Box, ...]
    """Where what each rank holds goes, by position, in coordinates of the new local tensor."""
    sizes: tuple[int, ...]
    """Shape of the new local tensor."""
    in_rows: bool
    """Whether what the ranks hold follows each other in memory, as much of each."""
    costs: CostModel

    @property
    def key(self) -> Hashable:
        """All that goes between the same ranks goes at once."""
        return (Gather, self.peers)

    def needs(self, local: Tensor) -> Needs:
        """Return the memory of the result and of one round."""
        whole = math.prod(self.sizes) * local.element_size()
        buffer = min(whole, self.costs.round_bytes)
        return Needs(self.peers, whole, (whole,) if self.in_rows else (whole, buffer, buffer))

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Start the all-gather, right to where it is to lie if that is in rows."""
        if not self.in_rows or 0 in self.sizes:
            results = self.start_all([self], [local])
            return lambda: results()[0]
        made = local.new_empty(self.sizes)
        sent = to_bytes(local)
        if later and sent.untyped_storage() is local.untyped_storage():
            sent = sent.clone()  # for the old tensor may be written before
        work = start_all_gather(to_bytes(made), sent, self.peers)

        def finish() -> Tensor:
            work.wait()
            return made

        return finish

    def start_all(self, steps: Sequence[Step], locals_: Sequence[Tensor]) -> Results:
        """Start the all-gathers of all in one."""
        gathers = [step for step in steps if isinstance(step, Gather)]
        made = [local.new_empty(s.sizes) for s, local in zip(gathers, locals_, strict=True)]
        receives = [
            [ViewPart(new[step.boxes[i].slices]) for step, new in zip(gathers, made, strict=True)]
            for i in range(self.peers.size)
        ]
        if all(new.numel() == 0 for new in made):
            return lambda: made
        sends = [ViewPart(t) for t in locals_]
        finish = gather(sends, receives, self.peers, locals_[0].device, self.costs)

        def results() -> list[Tensor]:
            finish()
            return made

        return results


def _by_dtype(locals_: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of tensors of one dtype, in the order of the first ones."""
    places: dict[torch.dtype, list[int]] = {}
    for i, local in enumerate(locals_):
        places.setdefault(local.dtype, []).append(i)
    return list(places.values())


def _flat_row(tensors: Sequence[Tensor], places: Sequence[int] | None = None) -> Tensor:
    chosen = tensors if places is None else [tensors[i] for i in places]
    return torch.cat([tensor.reshape(-1) for tensor in chosen])


def make_step(
    hop: Hop,
    rank: int,
    ranks: Sequence[int],
    peers: Peers | None,
    device: torch.device,
    costs: CostModel,
) -> Step:
    """Return what a rank does for a hop.

    ``ranks`` are those that talk to each other, by position among the ``peers``; ``device`` is
    where the tensor of the target lies.
    """
    if hop.kind == "spread":
        here = _coordinate(hop.target, rank)
        return SpreadTerm(hop.reduce_op, all(here[axis] == 0 for axis in hop.axes))
    if hop.kind == "slice":
        here = _coordinate(hop.source, rank)
        return Slice(hop.target.box(here).relative_to(hop.source.box(here)))
    if peers is None:
        raise PlacementError(f"{hop}: no process group for the axes {hop.axes} was given")
    if hop.kind == "exchange":
        return _make_exchange(hop, rank, ranks, peers, device, costs)
    here = _coordinate(hop.source, rank)
    if hop.kind == "gather":
        whole = hop.target.box(here)
        boxes = [hop.source.box(_coordinate(hop.source, r)).relative_to(whole) for r in ranks]
        in_rows = peers.is_in_order and gathers_in_rows(hop)
        return Gather(peers, tuple(boxes), whole.sizes, in_rows, costs)
    if hop.source.splits == hop.target.splits:
        return AllReduce(peers, hop.reduce_op, costs.few_bytes)
    own = hop.source.box(here)
    boxes = [hop.target.box(_coordinate(hop.target, r)).relative_to(own) for r in ranks]
    return ReduceScatter(peers, hop.reduce_op, tuple(boxes))


def _make_exchange(
    hop: Hop,
    rank: int,
    ranks: Sequence[int],
    peers: Peers,
    device: torch.device,
    costs: CostModel,
) -> Exchange:
    flows = Flows(hop.source, hop.target)
    position = {r: i for i, r in enumerate(ranks)}
    sends: list[Box | None] = [None] * len(ranks)
    receives: list[Box | None] = [None] * len(ranks)
    here = hop.source.mesh.coordinate(rank)
    if here is not None:
        own = hop.source.box(here)
        for taker, box in flows.out_of(rank):
            sends[position[taker]] = box.relative_to(own)
    at = hop.target.mesh.coordinate(rank)
    sizes: tuple[int, ...] = (0,)
    if at is not None:
        wanted = hop.target.box(at)
        sizes = wanted.sizes
        for giver, box in flows.into(rank):
            receives[position[giver]] = box.relative_to(wanted)
    me = position[rank]
    old, new = sends[me], receives[me]
    sends[me] = receives[me] = None
    kept = None if old is None or new is None else (old, new)
    return Exchange(
        peers=peers,
        sends=tuple(sends),
        receives=tuple(receives),
        kept=kept,
        sizes=sizes,
        most_numel=most_moved(hop),
        in_rows=moves_in_rows(hop),
        costs=costs,
        device=device,
        prepared=PreparedExchange.plan(peers, sends, receives, kept, sizes),
    )


def _coordinate(layout: Layout, rank: int) -> tuple[int, ...]:
    at = layout.mesh.coordinate(rank)
    if at is None:
        raise PlacementError(f"rank {rank} is not in mesh {layout.mesh}, which has the layout")
    return at
