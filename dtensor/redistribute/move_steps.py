"""The steps of a redistribute plan that move boxes as they are: exchanges and all-gathers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import Peers, start_all_gather, to_bytes
from ..comm.costs import CostModel
from ..comm.exchanges import BoxExchange
from ..comm.message_parts import ViewPart
from ..comm.packing import gather
from ..geometry.box import Box
from .steps import Needs, Result, Results, Step


@dataclass(frozen=True, slots=True)
class Exchange(Step):
    """Any shards to any shards: each rank gets exactly the boxes that it lacks."""

    boxes: BoxExchange
    most_numel: int
    """The most elements that any rank sends or receives."""
    in_rows: bool
    """Whether all that any rank sends or receives is whole rows of its tensors, where those are
    contiguous."""
    costs: CostModel
    device: torch.device

    @property
    def key(self) -> Hashable:
        """All that goes between the same ranks goes at once."""
        return (Exchange, self.boxes.peers)

    def needs(self, local: Tensor) -> Needs:
        """Return the memory of the result and of one round."""
        itemsize = local.element_size()
        most = self.most_numel * itemsize
        result = math.prod(self.boxes.sizes) * itemsize
        if self.in_rows and self.costs.is_direct(most) and not local.is_contiguous():
            # No rows in this rank's memory: all that goes from it straight is packed at once.
            sent = self.boxes.given_numel * itemsize
        else:
            sent = min(most, self.costs.round_bytes)
        return Needs(self.boxes.peers, most, (result, sent, min(most, self.costs.round_bytes)))

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Start the exchange."""
        num_bytes = self.most_numel * local.element_size()
        if self._is_one_round(num_bytes):
            finish = self.boxes.start(local, later=later)
            return lambda: self._placed(finish())
        finish_all = BoxExchange.start_in_rounds(
            [self.boxes], [local], num_bytes, self.costs, later=later, in_rows=self.in_rows
        )
        return lambda: self._placed(finish_all()[0])

    def start_all(
        self, steps: Sequence[Step], locals_: Sequence[Tensor], *, later: bool = False
    ) -> Results:
        """Start the exchanges of all in one."""
        if len(locals_) == 1:
            return super(Exchange, self).start_all(steps, locals_, later=later)
        exchanges = [step for step in steps if isinstance(step, Exchange)]
        boxes = [step.boxes for step in exchanges]
        pairs = list(zip(exchanges, locals_, strict=True))
        most = sum(step.most_numel * local.element_size() for step, local in pairs)
        if self._is_one_round(most):
            finish = BoxExchange.start_all(boxes, locals_, later=later)
        else:
            finish = BoxExchange.start_in_rounds(boxes, locals_, most, self.costs, later=later)
        return lambda: [s._placed(new) for s, new in zip(exchanges, finish(), strict=True)]

    def _is_one_round(self, num_bytes: int) -> bool:
        """Whether so much goes at once, through one buffer."""
        return num_bytes <= self.costs.round_bytes and not self.costs.is_direct(num_bytes)

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

    def start_all(
        self, steps: Sequence[Step], locals_: Sequence[Tensor], *, later: bool = False
    ) -> Results:
        """Start the all-gathers of all in one."""
        gathers = [step for step in steps if isinstance(step, Gather)]
        made = [local.new_empty(s.sizes) for s, local in zip(gathers, locals_, strict=True)]
        receives = [
            [ViewPart(new[step.boxes[i].slices]) for step, new in zip(gathers, made, strict=True)]
            for i in self.peers.by_group_rank(range(self.peers.size))
        ]
        if all(new.numel() == 0 for new in made):
            return lambda: made
        sends = [ViewPart(t) for t in locals_]
        finish = gather(sends, receives, self.peers, locals_[0].device, self.costs)

        def results() -> list[Tensor]:
            finish()
            return made

        return results
