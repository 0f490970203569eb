"""Reading every stored block on one rank of a host and copying out of its memory on all others.

Works in rounds, without a word between the ranks: in each a rank reads some stripes into a slot of
memory that all of them see, says there that they are verified, and copies what it wants out of the
slots of all. A slot is filled anew once all have copied out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ...dtensor.geometry.box import Box
from ..files.stored_data import StoredData
from ..reading.read_plan import Read
from ..reading.wants import Fill
from ..tensors.sink import Array
from .exchanging import Destinations
from .host_memory import HostMemory
from .stripe_memory import arrays_in, open_files, reads_into, room_of
from .stripes import Stripe, StripedTensor, deal

Execute = Callable[[Sequence[Read | Fill]], int]
"""Runs reads and returns the bytes read."""


Rounds = list[list[list[Stripe]]]
"""What each rank reads, by round."""


def rounds_of(tensors: Sequence[StripedTensor], memory: HostMemory) -> Rounds:
    """Deal out what ranks read for each other, as much in a round as the slots hold."""
    rounds: Rounds = []
    for stripes in deal(tensors, memory.num_ranks, memory.slot_bytes):
        by_reader: list[list[Stripe]] = [[] for _ in range(memory.num_ranks)]
        for stripe in stripes:
            by_reader[stripe.reader].append(stripe)
        rounds.append(by_reader)
    return rounds


def take_room(rounds: Rounds, memory: HostMemory, position: int) -> bool:
    """Take as much memory as a rank needs for what it reads; whether there is so much."""
    return memory.take_room(position, [sum(map(room_of, by[position])) for by in rounds])


class Sharing:
    """The rounds of one load, as one rank takes part in them."""

    bytes_received = 0
    """Bytes of destinations that other ranks have read."""

    def __init__(
        self,
        data: StoredData,
        rounds: Rounds,
        memory: HostMemory,
        position: int,
    ) -> None:
        """Plan all reads of this rank; Corrupt where a file or an entry is not what it must be."""
        self._memory = memory
        self._position = position
        self._parts: dict[tuple[int, int], _Common | None] = {}
        """By boxes of stripes and of destinations, which many tensors have in common."""
        self._boxes: dict[Box, Box] = {}
        """One for all destinations that are alike, by itself."""
        self._rounds = rounds
        open_files(data, chain.from_iterable(by[position] for by in self._rounds))
        self.reads = [
            reads_into(memory.slot(position, number), by_reader[position], data)
            for number, by_reader in enumerate(self._rounds)
        ]
        """What this rank reads, by round."""

    def run(
        self,
        destinations: Destinations,
        touched: dict[str, None],
        execute: Execute,
        is_broken: Callable[[], bool],
    ) -> int:
        """Read and copy until all is in its place; return the bytes that this rank has read.

        All ranks call this, or ``call_off``. Raises CalledOff where another rank fails. ``touched``
        collects the names of tensors that were changed.
        """
        num_bytes = 0
        for number in range(-1, len(self._rounds)):
            if number + 1 < len(self._rounds):
                num_bytes += self._fill(number + 1, execute, is_broken)
            if number >= 0:
                self._take_all(number, destinations, touched, is_broken)
        return num_bytes

    def call_off(self) -> None:
        """Let the others know that this rank has failed."""
        self._memory.call_off()

    def _fill(self, number: int, execute: Execute, is_broken: Callable[[], bool]) -> int:
        """Read what this rank reads in a round, once the slot is free; return the bytes."""
        memory = self._memory
        memory.wait(lambda: memory.is_free(number), is_broken)
        num_bytes = execute(self.reads[number])
        memory.note_filled(self._position, number)
        return num_bytes

    def _take_all(
        self,
        number: int,
        destinations: Destinations,
        touched: dict[str, None],
        is_broken: Callable[[], bool],
    ) -> None:
        """Copy what this rank wants of a round, from whoever is ready."""
        memory, num_ranks = self._memory, self._memory.num_ranks
        pending = [(self._position + step) % num_ranks for step in range(num_ranks)]

        def ready() -> list[int]:
            return [position for position in pending if memory.is_filled(position, number)]

        while pending:
            memory.wait(lambda: bool(ready()), is_broken)
            for position in ready():
                pending.remove(position)
                found = arrays_in(memory.slot(position, number), self._rounds[number][position])
                taken = self._copy(found, destinations, touched)
                if position != self._position:
                    self.bytes_received += taken
        memory.note_taken(self._position, number)

    def _copy(
        self,
        found: Iterable[tuple[Stripe, Box, Array]],
        destinations: Destinations,
        touched: dict[str, None],
    ) -> int:
        """Bring elements to their destinations, and return how many bytes they are there."""
        num_bytes = 0
        for stripe, box, array in found:
            for destination in destinations[stripe.tensor.stored.name]:
                wanted = self._boxes.setdefault(destination.box, destination.box)
                # Both live as long as this object: no number means another box meanwhile.
                key = id(box), id(wanted)
                if key not in self._parts:
                    self._parts[key] = _common(box, wanted)
                common = self._parts[key]
                if common is None:
                    continue
                touched[destination.name] = None
                destination.sink.put(common.there, array[common.here])
                num_bytes += common.numel * destination.itemsize
        return num_bytes


class _Common(NamedTuple):
    """The elements that two boxes have in common."""

    here: tuple[Any, ...]
    """Where they are in an array of the first one."""
    there: Box
    """And in the second one."""
    numel: int


def _common(box: Box, wanted: Box) -> _Common | None:
    common = box.intersect(wanted)
    if common is None:
        return None
    here = (*common.relative_to(box).slices, ...)
    return _Common(here, common.relative_to(wanted), common.numel)
