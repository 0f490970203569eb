"""How keys and values come to the queries of every rank, and their gradients home.

* ``ring``: from each rank to the next, by messages of peers. A rank holds its own, those that it
  computes with, and those that come next.
* ``alltoall``: the same steps, each as one collective.
* ``allgather``: all at once. A rank holds those of all ranks, and nothing waits for a neighbour.

What comes is on its way while the rank computes with what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from ..comm.collectives import Peers
from ..comm.message_parts import ViewPart
from ..comm.packing import Messages, gather
from .blocks import Sequences

RotateMethod = Literal["ring", "alltoall", "allgather"]

_METHODS: tuple[str, ...] = get_args(RotateMethod)
_DEFAULT: RotateMethod = "ring"

Contribute = Callable[[int, Tensor], Tensor | None]
"""Takes a rank and its keys and values, and returns their gradients as this rank's queries give
them; None where no query sees them."""


_of_process: list[RotateMethod] = [_DEFAULT]


def set_rotate_method(rotate_method: RotateMethod) -> None:
    """Set how keys and values go round where no call says so: "ring", "alltoall" or "allgather".

    For the process; all ranks set the same. "ring", which holds for as long as nothing is set,
    sends them from each rank to the next by messages, "alltoall" by a collective for each step, and
    "allgather" all at once, which holds the keys and values of all ranks.
    """
    _of_process[0] = rotate_method_of(rotate_method)


def rotate_method_of(given: str | None) -> RotateMethod:
    """Return a method that was given, that of the process for None; ValueError for another."""
    if given is None:
        return _of_process[0]
    for method in get_args(RotateMethod):
        if given == method:
            return method
    raise ValueError(f"rotate_method must be one of {_METHODS}, got {given!r}")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Brings the keys and values of other ranks, flat and joined, to this one."""

    sequences: Sequences
    peers: Peers
    method: RotateMethod

    @property
    def rank(self) -> int:
        """Position of this rank."""
        return self.peers.position

    def visit(self, own: Tensor, numels: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the position and the keys and values of every rank that this one's queries see.

        ``own`` are those of this rank, first of all; ``numels`` tells how large those of all are.
        """
        if self.method == "allgather":
            yield from self._visit_gathered(own, numels)
            return
        held = own
        count = self.peers.size
        for step in range(count):
            source = (self.rank - step) % count
            shift = _Shift(self, own)
            incoming = self._forward_keys(shift, step, held, numels)
            finish = shift.start() if self._is_used(step) else None
            if self._stop(source) >= step:
                yield source, held
            if finish is not None:
                finish()
            held = own if incoming is None else incoming

    def collect(
        self, own: Tensor, numels: Sequence[int], contribute: Contribute, like: Tensor
    ) -> Tensor:
        """Return the sum of what all ranks contribute to the gradients of this one's keys.

        ``like`` has the dtype and device of gradients.
        """
        if self.method == "allgather":
            return self._collect_gathered(own, numels, contribute, like)
        count, stop = self.peers.size, self._stop(self.rank)
        held, made, sums = own, None, None
        for step in range(count + 1):
            source = (self.rank - step) % count
            shift = _Shift(self, own)
            incoming = self._forward_keys(shift, step, held, numels)
            earlier = self._forward_gradients(shift, step, made, numels, like)
            home = None
            if stop and step == stop + 1:  # from the last rank that has added to them
                home = like.new_empty(numels[self.rank])
                shift.receive((self.rank + stop) % count, home)
            is_used = self._is_used(step) or self._is_used_by_gradients(step)
            finish = shift.start() if is_used else None
            given = None
            if step < count and self._stop(source) >= step:
                given = contribute(source, held)
            if finish is not None:
                finish()
            made = _sum(given, earlier)
            if step == 0:  # its own stay here
                sums, made = made, None
            sums = _sum(sums, home)
            held = own if incoming is None else incoming
        return like.new_zeros(numels[self.rank]) if sums is None else sums

    def _starts(self, source: int) -> int:
        return self.sequences.stops[source][0]

    def _stop(self, source: int) -> int:
        return self.sequences.stops[source][1]

    def _is_used(self, step: int) -> bool:
        """Whether any rank passes on keys in a step: otherwise nobody calls."""
        return any(stop > step for _, stop in self.sequences.stops)

    def _is_used_by_gradients(self, step: int) -> bool:
        return any(1 <= step - 1 <= stop for _, stop in self.sequences.stops)

    def _forward_keys(
        self, shift: _Shift, step: int, held: Tensor, numels: Sequence[int]
    ) -> Tensor | None:
        """Pass on the keys of a step; return where those of the next one come to, if they do."""
        count = self.peers.size
        if step >= count:
            return None
        source, coming = (self.rank - step) % count, (self.rank - step - 1) % count
        if self._stop(source) > step:
            shift.send((self.rank + 1) % count, held)
        if self._stop(coming) <= step:
            return None
        return shift.receive((self.rank - 1) % count, held.new_empty(numels[coming]))

    def _forward_gradients(
        self,
        shift: _Shift,
        step: int,
        made: Tensor | None,
        numels: Sequence[int],
        like: Tensor,
    ) -> Tensor | None:
        """Pass on the sums of the step before, or send them home from the last rank that adds.

        Return where those come to that this rank adds to in this step, if it does.
        """
        count = self.peers.size
        done = (self.rank - step + 1) % count
        if step >= 2 and self._starts(done) <= step - 1 <= self._stop(done):
            is_last = self._stop(done) == step - 1
            shift.send(done if is_last else (self.rank + 1) % count, made)
        source = (self.rank - step) % count
        earlier = None
        if 2 <= step < count and self._starts(source) < step <= self._stop(source):
            earlier = shift.receive((self.rank - 1) % count, like.new_empty(numels[source]))
        return earlier

    def _gather(
        self, own: Tensor, numels: Sequence[int]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        found = [own.new_empty(numel) for numel in numels]
        parts = self.peers.by_group_rank([[ViewPart(one)] for one in found])
        costs = self.peers.transport.costs
        return found, gather([ViewPart(own)], parts, self.peers, own.device, costs)

    def _visit_gathered(self, own: Tensor, numels: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        found, finish = self._gather(own, numels)
        if self.sequences.sees(self.rank, self.rank):
            yield self.rank, own
        finish()
        for source, held in enumerate(found):
            if source != self.rank and self.sequences.sees(self.rank, source):
                yield source, held

    def _collect_gathered(
        self, own: Tensor, numels: Sequence[int], contribute: Contribute, like: Tensor
    ) -> Tensor:
        shift = _Shift(self, own)
        sums = like.new_zeros(numels[self.rank])
        for source, held in self._visit_gathered(own, numels):
            given = contribute(source, held)
            if source == self.rank:
                sums = sums if given is None else given
            else:
                shift.send(source, given)
        others = [rank for rank in range(self.peers.size) if rank != self.rank]
        found = [
            shift.receive(rank, like.new_empty(numels[self.rank]))
            for rank in others
            if self.sequences.sees(rank, self.rank)
        ]
        shift.start()()
        for part in found:
            sums += part
        return sums


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of what there is, in the memory of the first."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


class _Shift:
    """What this rank sends to others at once, and receives."""

    def __init__(self, rotation: Rotation, like: Tensor) -> None:
        self._rotation = rotation
        self._device = like.device
        size = rotation.peers.size
        self._sends: list[list[ViewPart]] = [[] for _ in range(size)]
        self._receives: list[list[ViewPart]] = [[] for _ in range(size)]

    def send(self, rank: int, tensor: Tensor | None) -> None:
        """Send a tensor to a position."""
        if tensor is not None:
            self._sends[self._rotation.peers.group_ranks[rank]].append(ViewPart(tensor))

    def receive(self, rank: int, into: Tensor) -> Tensor:
        """Receive from a position into a tensor, which is returned."""
        self._receives[self._rotation.peers.group_ranks[rank]].append(ViewPart(into))
        return into

    def start(self) -> Callable[[], None]:
        """Start; the result waits until all has come."""
        peers = self._rotation.peers
        has_messages = self._device.type == "cpu" and peers.transport.costs.direct_bytes is not None
        direct = has_messages and self._rotation.method == "ring"
        messages = Messages(self._sends, self._receives, peers, self._device)
        wait = messages.start_round(0, 1, direct=direct)

        def finish() -> None:
            failures = wait()
            if failures:
                raise failures[0]

        return finish
