"""The steps of a redistribute plan that move boxes as they are: exchanges and all-gathers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import Peers, start_all_gather, to_bytes
from ..comm.costs import CostModel
from ..comm.packing import Messages, gather
from ..comm.parts import ViewPart
from ..comm.prepared import PLAIN_DTYPES, PreparedExchange
from ..geometry.box import Box
from .steps import Needs, Result, Results, Step


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
        result = math.prod(self.sizes) * local.element_size()
        if self.in_rows and self.costs.is_direct(most) and not local.is_contiguous():
            # No rows in this rank's memory: all that goes from it straight is packed at once.
            sent = sum(box.numel for box in self.sends if box is not None) * local.element_size()
        else:
            sent = min(most, self.costs.round_bytes)
        return Needs(self.peers, most, (result, sent, min(most, self.costs.round_bytes)))

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
