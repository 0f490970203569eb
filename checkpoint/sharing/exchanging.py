"""Reading every stored block on one rank and sending its elements to the ranks that want them.

Works in rounds. In each a rank reads its stripes into memory of its own, at most ROUND_BYTES, and
all agree that every read has succeeded. Then what was read goes to its destinations, by as many
all-to-all exchanges as keep what a rank sends and receives in each as small as the backend wants
it (``CostModel.round_bytes``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from ...dtensor.comm.caches import remembered
from ...dtensor.comm.collectives import Peers
from ...dtensor.comm.message_parts import ViewPart
from ...dtensor.comm.packing import Messages
from ...dtensor.geometry.box import Box
from ...dtensor.geometry.flows import Flows, PartFlow
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..ranks.boards import device_of
from ..reading import limits
from ..reading.read_plan import Read
from ..reading.wants import Fill
from ..tensors.dtypes import torch_items
from ..tensors.sink import Array, Sink
from .stripe_memory import arrays_in, open_files, reads_into, room_of
from .stripes import Stripe, StripedTensor, deal


@dataclass(frozen=True, slots=True)
class Destination:
    """Where elements of a box of a stored tensor go on this rank."""

    name: str
    """Of the tensor that is filled with them."""
    box: Box
    itemsize: int
    sink: Sink
    """Takes elements of the dtype that was saved, at places in the box."""


Destinations = Mapping[str, Sequence[Destination]]
"""Those of the elements of stored tensors, by the names of these."""


class StripeExchange:
    """The rounds of one load, as one rank takes part in them.

    For every round each rank calls ``prepare``, executes its ``reads`` and, once all have agreed
    that this went well, calls ``send``; at the end it calls ``finish``. What fails in ``send`` is
    raised by the call that comes next, so that no other rank waits for this one in a collective.
    """

    bytes_received = 0
    """Bytes of destinations that other ranks have read."""

    def __init__(
        self,
        data: StoredData,
        tensors: Sequence[StripedTensor],
        group: Any,
        all_ranks: tuple[int, ...],
    ) -> None:
        """Plan all reads of this rank; Corrupt where a file or an entry is not what it must be.

        ``all_ranks`` are the global numbers of the members of the group.
        """
        device = device_of(group)
        self._peers = Peers(group, tuple(range(len(all_ranks))), device_type=device.type)
        self._position: int = group.rank()
        self._all_ranks = all_ranks
        self._rounds = deal(tensors, len(all_ranks), limits.ROUND_BYTES)
        mine = [[s for s in stripes if s.reader == self._position] for stripes in self._rounds]
        open_files(data, chain.from_iterable(mine))
        most = max((sum(map(room_of, stripes)) for stripes in mine), default=0)
        self._stage = np.empty(most, dtype=np.uint8).data
        self._reads = [reads_into(self._stage, stripes, data) for stripes in mine]
        self._own: list[tuple[StoredTensor, Box, Array]] = []
        """What this rank has read for itself in a round."""
        self._messages = Messages((), (), self._peers, device)
        self._destinations: Destinations = {}
        self._touched: dict[str, None] = {}
        self._failure: BaseException | None = None

    @property
    def num_rounds(self) -> int:
        """Number of rounds, the same on all ranks."""
        return len(self._rounds)

    def reads(self, number: int) -> list[Read | Fill]:
        """Return what this rank reads in a round."""
        return self._reads[number]

    def prepare(self, number: int) -> int:
        """Find what goes where in a round and return how many exchanges this rank needs for it."""
        self.finish()
        stripes, rank = self._rounds[number], self._all_ranks[self._position]
        mine = arrays_in(self._stage, (s for s in stripes if s.reader == self._position))
        arrays = {(id(stripe.tensor), box): array for stripe, box, array in mine}
        positions = {rank: position for position, rank in enumerate(self._all_ranks)}
        sends: list[list[ViewPart]] = [[] for _ in positions]
        receives: list[list[_Received]] = [[] for _ in positions]
        self._own = []
        for tensor, readers in _by_tensor(stripes, self._all_ranks):
            sent, received = _flows(readers, tensor.layout, rank)
            for taker, box, common in sent:
                array = arrays[id(tensor), box][(*common.relative_to(box).slices, ...)]
                if taker == rank:
                    self._own.append((tensor.stored, common, array))
                else:
                    sends[positions[taker]].append(_view(array))
            for giver, _, common in received:
                if giver != rank:
                    receives[positions[giver]].append(_Received(tensor.stored, common, self))
        self._messages = replace(self._messages, sends=sends, receives=receives)
        most = self._messages.num_bytes
        return self._peers.transport.costs.num_rounds(most) if most else 0

    def send(
        self,
        count: int,
        destinations: Destinations,
        touched: dict[str, None],
        on_progress: Callable[[], None],
    ) -> None:
        """Send what this rank has read in ``count`` exchanges, and receive what others have.

        Collective. Never raises; ``touched`` collects the names of tensors that were changed.
        """
        self._destinations, self._touched = destinations, touched
        try:
            for stored, box, array in self._own:
                self.put(stored, box, array)
        except BaseException as error:  # told to the others where they expect it
            self._failure = error
        for number in range(count):
            try:
                failures = self._messages.start_round(number, count)()
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
        num_bytes = 0
        for destination in self._destinations[stored.name]:
            if destination.box.contains(box):
                self._touched[destination.name] = None
                destination.sink.put(box.relative_to(destination.box), items)
                num_bytes += box.numel * destination.itemsize
        return num_bytes

    def finish(self) -> None:
        """Raise what went wrong in the round before."""
        if self._failure is not None:
            raise self._failure


@dataclass(frozen=True, slots=True)
class _Received:
    """A box of a stored tensor that this rank wants, from the one that has read it."""

    stored: StoredTensor
    box: Box
    owner: StripeExchange

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.box.sizes

    @property
    def itemsize(self) -> int:
        return self.stored.dtype.itemsize

    def memory(self, box: Box) -> None:
        """Return None: a sink may take elements in another way than as memory."""

    def put(self, box: Box, items: torch.Tensor) -> None:
        array: Array = items.cpu().numpy().view(self.stored.dtype.items)
        part = box.translate(self.box.offsets)
        self.owner.bytes_received += self.owner.put(self.stored, part, array)


def _view(array: Array) -> ViewPart:
    """Return elements of any dtype as torch takes them."""
    return ViewPart(torch.from_numpy(array.view(torch_items(array.dtype.itemsize))))


_Readers = tuple[tuple[int, Box], ...]
"""Who reads which boxes of a tensor in a round."""


def _by_tensor(
    stripes: Iterable[Stripe], all_ranks: Sequence[int]
) -> Iterator[tuple[StripedTensor, _Readers]]:
    """Yield every tensor of which something is read in a round, with who reads it."""
    tensors: dict[int, StripedTensor] = {}
    readers: dict[int, list[tuple[int, Box]]] = {}
    for stripe in stripes:
        key = id(stripe.tensor)
        tensors[key] = stripe.tensor
        rank = all_ranks[stripe.reader]
        readers.setdefault(key, []).extend((rank, box) for box in stripe.boxes)
    for key, tensor in tensors.items():
        yield tensor, tuple(readers[key])


@remembered(64)  # many tensors have the same layout
def _flows(
    readers: _Readers, layout: Layout | IrregularLayout, rank: int
) -> tuple[list[PartFlow], list[PartFlow]]:
    """Return what a rank sends of what it has read, and what it receives."""
    flows = Flows(IrregularLayout(layout.shape, readers), layout)
    return flows.sent_by(rank), flows.received_by(rank)
