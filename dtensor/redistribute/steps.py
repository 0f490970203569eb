"""The steps of a redistribute plan: a hop of a route as one rank takes part in it.

A step starts, and the function that it returns waits and gives the local tensor after it. Steps of
one ``key`` that several tensors take can go together, as one collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Peers
from ..comm.reductions import start_all_reduce, start_reduce_scatter
from ..geometry.box import Box
from ..mesh.modes import require_order_free

_split_copies: Any = torch.split_with_sizes_copy
"""torch's stubs say that it returns nothing."""

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

    def start_all(
        self, steps: Sequence[Step], locals_: Sequence[Tensor], *, later: bool = False
    ) -> Results:
        """Start steps of this one's key together, each on its tensor; ``later`` as in ``start``."""
        results = [
            step.start(local, later=later) for step, local in zip(steps, locals_, strict=True)
        ]
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
class Collect(Step):
    """A slice of several boxes, which are put together in another order."""

    boxes: tuple[Box, ...]
    places: tuple[Box, ...]
    """Where they go, in the new local tensor."""
    sizes: tuple[int, ...]
    """Shape of the new local tensor."""

    def start(self, local: Tensor, *, later: bool = False) -> Result:
        """Return copies of the boxes in their places."""
        made = local.new_empty(self.sizes)
        for box, place in zip(self.boxes, self.places, strict=True):
            made[place.slices] = local[box.slices]
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
        require_order_free(local.dtype, self.reduce_op)
        return start_all_reduce(local, self.reduce_op, self.peers, self.few_bytes)

    def start_all(
        self, steps: Sequence[Step], locals_: Sequence[Tensor], *, later: bool = False
    ) -> Results:
        """Start the reduction of all, those of each dtype in one."""
        if len(locals_) == 1:
            return super(AllReduce, self).start_all(steps, locals_, later=later)
        rows = [
            (places, self._start_row(locals_, places)) for places in _rows(locals_, self.reduce_op)
        ]

        def finish() -> list[Tensor]:
            made = list(locals_)
            for places, reduced in rows:
                # Each in memory of its own: none is kept alive, or written, through another.
                sizes = [locals_[i].numel() for i in places]
                parts = _split_copies(reduced(), sizes)
                for i, part in zip(places, parts, strict=True):
                    made[i] = part.view(locals_[i].shape)
            return made

        return finish

    def _start_row(self, locals_: Sequence[Tensor], places: Sequence[int]) -> Result:
        row = _flat_row(locals_, places)
        return start_all_reduce(row, self.reduce_op, self.peers, self.few_bytes, is_own=True)


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
        require_order_free(local.dtype, self.reduce_op)
        terms = [local[box.slices] for box in self.boxes]
        return start_reduce_scatter(terms, self.reduce_op, self.peers, later=later)

    def start_all(
        self, steps: Sequence[Step], locals_: Sequence[Tensor], *, later: bool = False
    ) -> Results:
        """Start the reduction of all, those of each dtype in one."""
        if len(locals_) == 1:
            return super(ReduceScatter, self).start_all(steps, locals_, later=later)
        boxes = [step.boxes for step in steps if isinstance(step, ReduceScatter)]
        here = self.peers.position
        rows: list[tuple[list[int], Result]] = []
        for places in _rows(locals_, self.reduce_op):
            terms = [
                _flat_row([locals_[i][boxes[i][position].slices] for i in places])
                for position in range(self.peers.size)
            ]
            reduced = start_reduce_scatter(terms, self.reduce_op, self.peers, later=later)
            rows.append((places, reduced))

        def finish() -> list[Tensor]:
            made = list(locals_)
            for places, reduced in rows:
                own = [boxes[i][here] for i in places]
                parts = _split_copies(reduced(), [box.numel for box in own])
                for i, box, part in zip(places, own, parts, strict=True):
                    made[i] = part.view(box.sizes)
            return made

        return finish


def _rows(locals_: Sequence[Tensor], reduce_op: str) -> list[list[int]]:
    """Return the places of terms of one dtype, in the order of the first ones.

    Raises PlacementError where some must not be reduced here (`require_order_free`), before any is.
    """
    places: dict[torch.dtype, list[int]] = {}
    for i, local in enumerate(locals_):
        places.setdefault(local.dtype, []).append(i)
    for dtype in places:
        require_order_free(dtype, reduce_op)
    return list(places.values())


def _flat_row(tensors: Sequence[Tensor], places: Sequence[int] | None = None) -> Tensor:
    chosen = tensors if places is None else [tensors[i] for i in places]
    return torch.cat([tensor.reshape(-1) for tensor in chosen])
