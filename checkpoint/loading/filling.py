"""Filling destinations: each rank for itself, or once and then sent to those that want the same.

What a rank reads is planned once, when it is known which ranks read what. Reads alternate with
collectives. All ranks agree that the reads have succeeded before they enter one, so none waits in
it for a rank that has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from ..files.stored_data import StoredData
from ..ranks.together import Answers, Decide, Ranks, nothing, together
from ..reading import limits
from ..reading.execution import execute
from ..reading.read_plan import Read, plan_reads
from ..reading.wants import Fill
from ..sharing.broadcasting import Broadcasts
from ..sharing.exchanging import Destination, StripeExchange
from ..sharing.host_memory import HostMemory
from ..sharing.on_host import Rounds, Sharing, rounds_of, take_room
from ..sharing.read_once import (
    MIN_REPLICAS,
    MIN_TIMES_ASKED,
    Offer,
    Shareable,
    find_shareable,
    fingerprint,
)
from ..sharing.striping import Striped, find_striped
from ..tensors.local_tensor import LocalTensor
from ..timing.bars import OnProgress
from ..timing.recorder import Recorder
from ..timing.sharing import last_round
from .destinations import Destinations
from .shared_memory import SharedMemory


class Filling:
    """How one rank fills its destinations: offer to share the reading, plan, run."""

    def __init__(
        self,
        destinations: Destinations,
        data: StoredData,
        ranks: Ranks,
        group: Any,
        recorder: Recorder,
        on_progress: OnProgress | None,
        num_local: int,
        memory: HostMemory | None,
    ) -> None:
        """``group`` is the process group of the load, if there are several ranks.

        ``num_local`` of them are on this host; ``memory`` is what they can share if all are.
        """
        self._destinations = destinations
        self._data = data
        self._ranks = ranks
        self._group = group
        self._recorder = recorder
        self._tell_user = on_progress
        self._num_local = num_local
        self._memory = memory
        self._read_bytes = 0
        """What has been read, gaps between what is wanted included."""
        self._lock = threading.Lock()
        self._shareable: list[Shareable] = []
        self._striped = Striped()
        """What ranks read for each other, by the process group unless they share memory."""
        self._in_memory = Striped()
        """What they would by memory."""
        self._rounds: Rounds = []
        self._broadcasts: Broadcasts | None = None
        self._stripes: StripeExchange | None = None
        self._sharing: Sharing | None = None
        self._received: dict[str, list[Destination]] = {}
        """Where tensors go that other ranks read."""
        self._reads: list[Read | Fill] = []
        self._touched: dict[str, None] = {}
        self.is_planned = False
        self.bytes_read = 0
        self.bytes_received = 0

    def offer(self, offer: Offer, own: set[str], *, may_exchange: bool) -> Offer:
        """Return an offer with what ranks must know to decide whether they read for each other.

        ``own`` are destinations that this rank keeps for itself. Without ``may_exchange`` the
        memory of the host is the only way.
        """
        asked, ranks, tensors = offer.asked, self._ranks, self._destinations.tensors
        tied = self._destinations.tied_names()
        common = {name: local for name, local in tensors.items() if name not in own}
        untied = {name: local for name, local in common.items() if name not in tied}
        if self._memory is not None and self._can_share(untied, self._memory, asked=bool(asked)):
            offer = replace(
                offer,
                in_memory=fingerprint(common, (), self._in_memory, sorted(tied)),
                times_in_memory=self._in_memory.times,
            )
        if not may_exchange:
            return offer
        shareable = find_shareable(
            untied, self._destinations.held, ranks.all, 2 if asked else MIN_REPLICAS
        )
        self._striped = find_striped(
            untied,
            self._data.manifest.tensors,
            ranks.all,
            ranks.rank,
            {item.name for item in shareable},
            MIN_TIMES_ASKED if asked else limits.MIN_TIMES,
        )
        self._shareable = [item for item in shareable if item.name not in self._striped.names]
        return replace(
            offer,
            fingerprint=fingerprint(common, self._shareable, self._striped, sorted(tied)),
            times=self._striped.times,
            has_replicas=bool(self._shareable),
        )

    def _can_share(
        self, tensors: Mapping[str, LocalTensor], memory: HostMemory, *, asked: bool
    ) -> bool:
        """Find what ranks of this host read once into their memory, if it is worth it.

        Replicas where that was asked for, or reading is dear: each has to copy all of it anyway,
        and out of the page cache that takes no longer than out of this memory.
        """
        with_replicas = asked or limits.is_remote(self._data.store)
        self._in_memory = find_striped(
            tensors,
            self._data.manifest.tensors,
            self._ranks.all,
            self._ranks.rank,
            () if with_replicas else tensors,
            limits.MIN_TIMES,
            with_plain=with_replicas,
        )
        if self._in_memory.num_bytes < limits.MIN_SHARED_BYTES:
            return False
        self._rounds = rounds_of(list(self._in_memory.tensors.values()), memory)
        return take_room(self._rounds, memory, self._position)

    @property
    def _position(self) -> int:
        return self._ranks.all.index(self._ranks.rank)

    def plan(self, *, share: bool, in_memory: bool) -> None:
        """Plan what this rank reads, for itself or for all; nothing has been changed until now.

        Raises Corrupt or LayoutMismatch where a file or a part of a tensor is not there.
        """
        elsewhere: set[str] = set()
        if in_memory:
            self._striped, self._shareable = self._in_memory, []
        elif self._memory is not None:
            self._memory.close()  # it may have taken room
        if share and self._striped.names:
            if in_memory and self._memory is not None:
                self._sharing = Sharing(self._data, self._rounds, self._memory, self._position)
            else:
                striped = list(self._striped.tensors.values())
                self._stripes = StripeExchange(self._data, striped, self._group, self._ranks.all)
            elsewhere |= self._striped.names
        if share and self._shareable:
            tensors = self._destinations.tensors
            self._broadcasts = Broadcasts(self._shareable, tensors, self._group)
            elsewhere |= self._broadcasts.read_elsewhere()
        self._reads = plan_reads(self._data, self._destinations.wants(elsewhere))
        self.is_planned = True

    def compare(self, shared: SharedMemory) -> None:
        """Raise LayoutMismatch where destinations that share memory are to get other values."""
        with self._recorder.phase("read") as phase:
            alive = self._ranks.tell_alive
            phase.num_bytes = shared.check(self._data, lambda _: alive(), self._num_local)
        self.bytes_read += phase.num_bytes

    def run(self, *, is_last: bool) -> None:
        """Fill the destinations. Collective; all ranks raise the same error.

        With ``is_last`` no round of the load follows, and this one's last tells what it has cost.
        """
        sends, exchanges = self._broadcasts is not None, self._stripes is not None
        count = self._together_read(0, is_last=is_last and not (sends or exchanges))
        if self._broadcasts is not None:
            send = partial(self._broadcast, self._broadcasts)
            self._together("load: send to replicas", send, is_last=is_last and not exchanges)
        if self._stripes is not None:
            self._exchange(self._stripes, count, is_last=is_last)

    def _together(
        self,
        phase: str,
        body: Callable[[], bytes],
        decide: Decide = nothing,
        *,
        is_last: bool,
    ) -> bytes:
        run = partial(together, self._ranks)
        if is_last:
            run = partial(last_round, self._ranks, self._recorder)
        return run(phase, body, decide, touched=self._touched_names, give_up=self._give_up)

    def _together_read(self, number: int, *, is_last: bool = False) -> int:
        """Read what belongs to a round; return how many exchanges must follow it."""

        def most(counts: Answers) -> bytes:
            return b"%d" % max(map(int, counts.values()))

        def read() -> bytes:
            return b"%d" % self._read(number)

        return int(self._together("load: read", read, most, is_last=is_last))

    def _read(self, number: int) -> int:
        with self._recorder.phase("read") as phase:
            before = self.bytes_read
            count = self._read_part(number)
            phase.num_bytes = self.bytes_read - before
        return count

    def _give_up(self) -> None:
        """Have no rank wait for what this one would have read: it has failed."""
        if self._sharing is not None:
            self._sharing.call_off()

    def _read_part(self, number: int) -> int:
        """Read, and return how many exchanges this rank needs for what it has read."""
        if number == 0:
            self._destinations.materialise()
            reads = self._reads
            if self._stripes is not None or self._sharing is not None:
                # Now: once all have read, the others are in a collective.
                self._received, fills = self._destinations.received(self._striped)
                reads = [*reads, *fills]
            self.bytes_read += self._execute(reads, self._touched)
            if self._sharing is not None:
                self.bytes_read += self._sharing.run(
                    self._received, self._touched, self._execute, self._ranks.is_broken
                )
                self.bytes_received += self._sharing.bytes_received
        if self._stripes is None:
            return 0
        count = self._stripes.prepare(number)
        reads = self._stripes.reads(number)
        self.bytes_read += self._execute(reads)
        return count

    def _execute(self, reads: Sequence[Read | Fill], touched: dict[str, None] | None = None) -> int:
        return execute(reads, touched=touched, on_progress=self._get_on, num_local=self._num_local)

    def _get_on(self, num_bytes: int) -> None:
        """Note that so many bytes have been read; called from several threads."""
        self._ranks.tell_alive()
        if self._tell_user is not None:
            with self._lock:
                self._read_bytes += num_bytes
                self._tell_user(self._read_bytes, self._planned_bytes)

    @cached_property
    def _planned_bytes(self) -> int:
        stripes = self._stripes
        shared = () if stripes is None else map(stripes.reads, range(stripes.num_rounds))
        in_memory = () if self._sharing is None else self._sharing.reads
        reads = chain(self._reads, *shared, *in_memory)
        return sum(read.num_bytes for read in reads if isinstance(read, Read))

    def _broadcast(self, broadcasts: Broadcasts) -> bytes:
        """Exchange with replicas what each of them has read."""
        self._touched |= dict.fromkeys(broadcasts.names)
        tensors = self._destinations.tensors
        with self._recorder.phase("receive") as phase:
            phase.num_bytes = broadcasts.run(tensors, self._ranks.tell_alive)
        self.bytes_received += phase.num_bytes
        return b""

    def _exchange(self, stripes: StripeExchange, count: int, *, is_last: bool) -> None:
        """Exchange what was read in the first round, then read and exchange in turns."""
        for number in range(stripes.num_rounds):
            if number > 0:
                count = self._together_read(number)
            with self._recorder.phase("receive") as phase:
                before = stripes.bytes_received
                stripes.send(count, self._received, self._touched, self._ranks.tell_alive)
                phase.num_bytes = stripes.bytes_received - before

        def finish() -> bytes:
            stripes.finish()
            return b""

        self._together("load: exchange", finish, is_last=is_last)
        self.bytes_received += stripes.bytes_received

    def _touched_names(self) -> list[str]:
        """Return what was overwritten of what the caller can see."""
        return self._destinations.seen(self._touched)
