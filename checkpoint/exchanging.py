"""Reading every stored block on one rank and sending its elements to the ranks that want them.

Works in rounds. In each a rank reads its stripes into memory of its own, at most ROUND_BYTES, and
all agree that every read has succeeded. Then what was read goes to its destinations, by as many
all-to-all exchanges as keep what a rank sends and receives in each within EXCHANGE_BYTES.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..dtensor.box import Box
from ..dtensor.collectives import Peers, all_to_all_packed
from ..dtensor.layout import Layout
from .messages import Messages, Piece, pack, slice_bytes, slices
from .reading import Array, ArraySink, Read, Sink, Want, plan_reads
from .rendezvous import device_of
from .stored import StoredData
from .stripes import ALIGNMENT, Spread, Stripe, deal

EXCHANGE_BYTES = 16 << 20
"""About as much does a rank send, and receive, in one exchange."""
_GROWTH_BYTES = 64 << 10


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
        self._held = {id(s): _box_of(s.layout, all_ranks[self._position]) for s in spreads}
        self._rounds = deal(spreads, len(all_ranks))
        mine = [[s for s in stripes if s.reader == self._position] for stripes in self._rounds]
        self._stage = _Stage(mine)
        self._reads = [plan_reads(data, self._stage.wants(stripes)) for stripes in mine]
        self._messages = Messages()
        self._failure: BaseException | None = None
        self._sent = self._received = np.empty(0, dtype=np.uint8)

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
        self._messages = messages = Messages()
        stripes = self._rounds[number]
        for stripe, box, array in self._stage.arrays(s for s in stripes if self._is_mine(s)):
            for rank, common in _holders(stripe.spread.layout, box):
                piece = Piece(
                    stripe.spread.stored, common, array[(*common.relative_to(box).slices, ...)]
                )
                messages.outgoing.setdefault(self._positions[rank], []).append(piece)
        for stripe in stripes:
            held = self._held[id(stripe.spread)]
            for box in () if self._is_mine(stripe) else stripe.boxes:
                common = box.intersect(held)
                if common is not None:
                    piece = Piece(stripe.spread.stored, common)
                    messages.incoming.setdefault(stripe.reader, []).append(piece)
        messages.own = messages.outgoing.pop(self._position, [])
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
        try:
            for piece in self._messages.own:
                _put(piece, piece.box, piece.source, destinations, touched)
        except BaseException as error:  # told to the others where they expect it
            self._failure = error
        for number in range(count):
            try:
                received = self._exchange(number, count)
            except BaseException as error:  # the group is of no use any more
                self._failure = self._failure or error
                return
            try:
                on_progress()
                self._unpack(received, number, count, destinations, touched)
            except BaseException as error:
                self._failure = self._failure or error

    def finish(self) -> None:
        """Raise what went wrong in the round before."""
        if self._failure is not None:
            raise self._failure

    def _exchange(self, number: int, count: int) -> Iterator[tuple[list[Piece], memoryview]]:
        """Send and receive one slice of everything; return the pieces of each rank with theirs."""
        everyone = range(self._peers.size)
        outgoing = [self._messages.outgoing.get(position, []) for position in everyone]
        incoming = [self._messages.incoming.get(position, []) for position in everyone]
        send_bytes = [slice_bytes(pieces, number, count) for pieces in outgoing]
        receive_bytes = [slice_bytes(pieces, number, count) for pieces in incoming]
        self._sent = _grown(self._sent, sum(send_bytes))
        self._received = _grown(self._received, sum(receive_bytes))
        try:
            ends = itertools.accumulate(send_bytes)
            for message, size, end in zip(outgoing, send_bytes, ends, strict=True):
                pack(message, number, count, self._sent[end - size : end])
        except BaseException as error:  # others wait for as many bytes, whatever they are
            self._failure = self._failure or error
        device = device_of(self._peers.group)
        sent = torch.from_numpy(self._sent[: sum(send_bytes)]).to(device)
        host = torch.from_numpy(self._received[: sum(receive_bytes)])
        received = host.to(device)
        all_to_all_packed(sent, send_bytes, received, receive_bytes, self._peers)
        if received is not host:
            host.copy_(received)
        ends = itertools.accumulate(receive_bytes)
        return (
            (pieces, self._received.data[end - size : end])
            for pieces, size, end in zip(incoming, receive_bytes, ends, strict=True)
        )

    def _unpack(
        self,
        received: Iterable[tuple[list[Piece], memoryview]],
        number: int,
        count: int,
        destinations: Mapping[str, Destination],
        touched: dict[str, None],
    ) -> None:
        for pieces, data in received:
            for piece, box, start in slices(pieces, number, count):
                items = np.ndarray(box.sizes, f"u{piece.itemsize}", buffer=data, offset=start)
                _put(piece, box, items, destinations, touched)
                self.bytes_received += box.numel * destinations[piece.stored.name].itemsize


def _grown(buffer: Array, num_bytes: int) -> Array:
    """Return a buffer that is large enough; a kept one has its memory already."""
    if len(buffer) >= num_bytes:
        return buffer
    return np.empty(-(-num_bytes // _GROWTH_BYTES) * _GROWTH_BYTES, dtype=np.uint8)


def _put(
    piece: Piece,
    box: Box,
    items: Array,
    destinations: Mapping[str, Destination],
    touched: dict[str, None],
) -> None:
    destination = destinations[piece.stored.name]
    touched[piece.stored.name] = None
    destination.sink.put(box.relative_to(destination.box), items)


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
            yield Want(tensor=stripe.source, box=box, sink=ArraySink(array))


def _room(stripe: Stripe) -> int:
    return -(-stripe.num_bytes // ALIGNMENT) * ALIGNMENT


def _box_of(layout: Layout, rank: int) -> Box:
    # A rank outside of the mesh has no coordinate, which the layout refuses.
    return layout.box(layout.mesh.coordinate(rank) or ())


@lru_cache(maxsize=64)  # many tensors have the same layout
def _holders(layout: Layout, box: Box) -> tuple[tuple[int, Box], ...]:
    """Return (rank, common box) for every rank that holds elements of a box."""
    return tuple(
        (layout.mesh.rank(layout.coordinate(cell, replica)), common)
        for cell, common in layout.cells_meeting(box)
        for replica in range(layout.num_replicas)
    )
