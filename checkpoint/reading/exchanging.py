"""Reading every stored block on one rank and sending its elements to the ranks that want them.

Works in rounds. In each a rank reads its stripes into memory of its own, at most ROUND_BYTES, and
all agree that every read has succeeded. Then what was read goes to its destinations, by as many
all-to-all exchanges as keep what a rank sends and receives in each within EXCHANGE_BYTES.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...dtensor.comm.caches import remembered
from ...dtensor.comm.collectives import Peers
from ...dtensor.comm.packing import Messages
from ...dtensor.geometry.box import Box
from ...dtensor.geometry.flows import Flow, holders
from ...dtensor.geometry.layout import Layout
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..ranks.boards import device_of
from .plan import Read, plan_reads
from .stripes import ALIGNMENT, Spread, Stripe, deal
from .wants import Array, ArraySink, Sink, Want

EXCHANGE_BYTES = 16 << 20
"""About as much does a rank send, and receive, in one exchange."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where this rank's part of a tensor goes."""

    box: Box
    itemsize: int
    sink: Sink
    """Takes elements of the dtype that was saved, at places in the box."""


class StripeExchange:
    """The rounds of one load, as one rank takes part in them.

    For every round each rank calls ``prepare``, executes its ``reads`` and, once all have agreed
    that this went well, calls ``send``; at the end it calls ``finish``. What fails in ``send`` is
    raised by the call that comes next, so that no other rank waits for this one in a collective.
    """

    bytes_received = 0
    """Bytes of destinations that other ranks have read."""

    def __init__(
        self, data: StoredData, spreads: Sequence[Spread], group: Any, all_ranks: tuple[int, ...]
    ) -> None:
        """Plan all reads of this rank; Corrupt where a file or an entry is not what it must be.

        ``all_ranks`` are the global numbers of the members of the group.
        """
        self._peers = Peers(group, tuple(range(len(all_ranks))))
        self._position: int = group.rank()
        self._positions = {rank: position for position, rank in enumerate(all_ranks)}
        self._held = {id(s): s.layout.held_by(all_ranks[self._position]) for s in spreads}
        self._rounds = deal(spreads, len(all_ranks))
        mine = [[s for s in stripes if s.reader == self._position] for stripes in self._rounds]
        self._stage = _Stage(mine)
        self._reads = [plan_reads(data, self._stage.wants(stripes)) for stripes in mine]
        self._messages = _Messages(self._peers.size)
        self._destinations: Mapping[str, Destination] = {}
        self._touched: dict[str, None] = {}
        self._failure: BaseException | None = None

    @property
    def num_rounds(self) -> int:
        """Number of rounds, the same on all ranks."""
        return len(self._rounds)

    def reads(self, number: int) -> list[Read]:
        """Return what this rank reads in a round."""
        return self._reads[number]

    def prepare(self, number: int) -> int:
        """Find what goes where in a round and return how many exchanges this rank needs for it."""
        self.finish()
        self._messages = messages = _Messages(self._peers.size)
        stripes = self._rounds[number]
        for stripe, box, array in self._stage.arrays(s for s in stripes if self._is_mine(s)):
            for rank, common in _holders(stripe.spread.layout, box):
                items = array[(*common.relative_to(box).slices, ...)]
                sent = _Sent(stripe.spread.stored, common, items)
                position = self._positions[rank]
                if position == self._position:
                    messages.own.append(sent)
                else:
                    messages.outgoing[position].append(sent)
        for stripe in stripes:
            held = () if self._is_mine(stripe) else self._held[id(stripe.spread)]
            for box, part in itertools.product(stripe.boxes, held):
                common = box.intersect(part)
                if common is not None:
                    found = _Received(stripe.spread.stored, common, self)
                    messages.incoming[stripe.reader].append(found)
        return -(-messages.num_bytes() // EXCHANGE_BYTES)

    def _is_mine(self, stripe: Stripe) -> bool:
        return stripe.reader == self._position

    def send(
        self,
        count: int,
        destinations: Mapping[str, Destination],
        touched: dict[str, None],
        on_progress: Callable[[], None],
    ) -> None:
        """Send what this rank has read in ``count`` exchanges, and receive what others have.

        Collective. Never raises; ``touched`` collects the names of tensors that were changed.
        """
        self._destinations, self._touched = destinations, touched
        device = device_of(self._peers.group)
        moved = Messages(self._messages.outgoing, self._messages.incoming, self._peers, device)
        try:
            for sent in self._messages.own:
                self.put(sent.stored, sent.box, sent.array)
        except BaseException as error:  # told to the others where they expect it
            self._failure = error
        for number in range(count):
            try:
                failures = moved.start_round(number, count)()
            except BaseException as error:  # the group is of no use any more
                self._failure = self._failure or error
                return
            try:
                on_progress()
            except BaseException as error:
                failures.append(error)
            self._failure = next((f for f in (self._failure, *failures) if f is not None), None)

    def put(self, stored: StoredTensor, box: Box, items: Array) -> int:
        """Bring elements to their destination, and return how many bytes they are there."""
        destination = self._destinations[stored.name]
        self._touched[stored.name] = None
        destination.sink.put(box.relative_to(destination.box), items)
        return box.numel * destination.itemsize

    def finish(self) -> None:
        """Raise what went wrong in the round before."""
        if self._failure is not None:
            raise self._failure


@dataclass(frozen=True, slots=True)
class _Elements:
    """A box of a stored tensor on its way between ranks."""

    stored: StoredTensor
    box: Box

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.box.sizes

    @property
    def itemsize(self) -> int:
        return self.stored.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Sent(_Elements):
    """What this rank has read, for a rank that wants it."""

    array: Array

    def view(self, box: Box) -> torch.Tensor:
        signed = self.array if self.itemsize == 1 else self.array.view(f"i{self.itemsize}")
        return torch.from_numpy(signed[(*box.slices, ...)])


@dataclass(frozen=True, slots=True)
class _Received(_Elements):
    """What this rank wants, from the one that has read it."""

    owner: StripeExchange

    def memory(self, box: Box) -> None:
        """Return None: a sink may take elements in another way than as memory."""

    def put(self, box: Box, items: torch.Tensor) -> None:
        array: Array = items.cpu().numpy().view(f"u{self.itemsize}")
        part = box.translate(self.box.offsets)
        self.owner.bytes_received += self.owner.put(self.stored, part, array)


class _Messages:
    """What moves in one round, by the position that it goes to or comes from."""

    def __init__(self, num_ranks: int) -> None:
        self.own: list[_Sent] = []
        """What this rank has read for itself."""
        self.outgoing: list[list[_Sent]] = [[] for _ in range(num_ranks)]
        self.incoming: list[list[_Received]] = [[] for _ in range(num_ranks)]

    def num_bytes(self) -> int:
        """Return how much this rank sends or receives, whichever is more."""
        sent = sum(part.box.numel * part.itemsize for parts in self.outgoing for part in parts)
        received = sum(part.box.numel * part.itemsize for parts in self.incoming for part in parts)
        return max(sent, received)


class _Stage:
    """The memory that holds the stripes which this rank has read in a round."""

    def __init__(self, rounds: Sequence[Sequence[Stripe]]) -> None:
        sizes = [sum(_room(stripe) for stripe in stripes) for stripes in rounds]
        self._memory = np.empty(max(sizes, default=0), dtype=np.uint8)

    def arrays(self, stripes: Iterable[Stripe]) -> Iterator[tuple[Stripe, Box, Array]]:
        """Yield the boxes of the stripes of a round, and where their elements are."""
        at = 0
        for stripe in stripes:
            start, itemsize = at, stripe.spread.stored.dtype.itemsize
            for box in stripe.boxes:
                data = self._memory.data
                yield stripe, box, np.ndarray(box.sizes, f"u{itemsize}", data, start)
                start += box.numel * itemsize
            at += _room(stripe)

    def wants(self, stripes: Iterable[Stripe]) -> Iterator[Want]:
        """Yield what is to be read in a round."""
        for stripe, box, array in self.arrays(stripes):
            yield Want(tensor=stripe.spread.stored, box=box, sink=ArraySink(array))


def _room(stripe: Stripe) -> int:
    return -(-stripe.num_bytes // ALIGNMENT) * ALIGNMENT


@remembered(64)  # many tensors have the same layout
def _holders(layout: Layout, box: Box) -> tuple[Flow, ...]:
    return tuple(holders(layout, box))
