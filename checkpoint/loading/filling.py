"""Filling destinations: each rank for itself, or once and then sent to those that want the same.

What a rank reads is planned once, when it is known which ranks read what. Reads alternate with
collectives. All ranks agree that the reads have succeeded before they enter one, so none waits in
it for a rank that has failed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..files.stored_data import StoredData
from ..ranks.together import Answers, Ranks, together
from ..reading.broadcasting import Broadcasts
from ..reading.exchanging import Destination, StripeExchange
from ..reading.execution import execute
from ..reading.read_once import (
    MIN_REPLICAS,
    MIN_TIMES,
    MIN_TIMES_ASKED,
    Offer,
    Shareable,
    find_shareable,
    fingerprint,
)
from ..reading.read_plan import Read, plan_reads
from ..reading.striping import Striped, find_striped
from ..reading.wants import Fill
from .destinations import Destinations


class Filling:
    """How one rank fills its destinations: offer to share the reading, plan, run."""

    def __init__(
        self, destinations: Destinations, data: StoredData, ranks: Ranks, group: Any
    ) -> None:
        """``group`` is the process group of the load, if there are several ranks."""
        self._destinations = destinations
        self._data = data
        self._ranks = ranks
        self._group = group
        self._shareable: list[Shareable] = []
        self._striped = Striped()
        self._broadcasts: Broadcasts | None = None
        self._stripes: StripeExchange | None = None
        self._received: dict[str, list[Destination]] = {}
        """Where tensors go that other ranks read."""
        self._reads: list[Read | Fill] = []
        self._comparisons: list[Read | Fill] = []
        """Reads for tied tensors: what is stored for each must be equal."""
        self._touched: dict[str, None] = {}
        self.is_planned = False
        self.bytes_read = 0
        self.bytes_received = 0

    def offer(self, offer: Offer, own: set[str]) -> Offer:
        """Return an offer with what ranks must know to decide whether they read for each other.

        ``own`` are destinations that this rank keeps for itself.
        """
        asked, ranks, tensors = offer.asked, self._ranks, self._destinations.tensors
        tied = self._destinations.tied_names()
        common = {name: local for name, local in tensors.items() if name not in own}
        untied = {name: local for name, local in common.items() if name not in tied}
        shareable = find_shareable(
            untied, self._destinations.held, ranks.all, 2 if asked else MIN_REPLICAS
        )
        self._striped = find_striped(
            untied,
            self._data.manifest.tensors,
            ranks.all,
            ranks.rank,
            {item.name for item in shareable},
            MIN_TIMES_ASKED if asked else MIN_TIMES,
        )
        self._shareable = [item for item in shareable if item.name not in self._striped.names]
        return replace(
            offer,
            fingerprint=fingerprint(common, self._shareable, self._striped, sorted(tied)),
            times=self._striped.times,
            has_replicas=bool(self._shareable),
        )

    def plan(self, *, share: bool) -> None:
        """Plan what this rank reads, for itself or for all; nothing has been changed until now.

        Raises Corrupt or LayoutMismatch where a file or a part of a tensor is not there.
        """
        elsewhere: set[str] = set()
        if share and self._striped.names:
            striped = list(self._striped.tensors.values())
            self._stripes = StripeExchange(self._data, striped, self._group, self._ranks.all)
            elsewhere |= self._striped.names
        if share and self._shareable:
            tensors = self._destinations.tensors
            self._broadcasts = Broadcasts(self._shareable, tensors, self._group)
            elsewhere |= self._broadcasts.read_elsewhere()
        filled, compared = self._destinations.wants(elsewhere)
        self._reads = plan_reads(self._data, filled)
        self._comparisons = plan_reads(self._data, compared)
        self.is_planned = True

    def run(self) -> None:
        """Fill the destinations. Collective; all ranks raise the same error."""
        count = self._together_read(0)
        if self._broadcasts is not None:
            send = partial(self._broadcast, self._broadcasts)
            together(self._ranks, "load: send to replicas", send, touched=self._touched_names)
        if self._stripes is not None:
            self._exchange(self._stripes, count)

    def _together_read(self, number: int) -> int:
        """Read what belongs to a round; return how many exchanges must follow it."""

        def most(counts: Answers) -> bytes:
            return b"%d" % max(map(int, counts.values()))

        def read() -> bytes:
            return b"%d" % self._read(number)

        return int(together(self._ranks, "load: read", read, most, touched=self._touched_names))

    def _read(self, number: int) -> int:
        if number == 0:
            self._destinations.materialise()
            reads = self._reads
            if self._stripes is not None:  # now: once all have read, the others are in a collective
                self._received, fills = self._destinations.received(self._striped)
                reads = [*reads, *fills]
            tell_alive = self._ranks.tell_alive
            self.bytes_read = execute(reads, touched=self._touched, on_progress=tell_alive)
            self.bytes_read += execute(self._comparisons, on_progress=tell_alive)
        if self._stripes is None:
            return 0
        count = self._stripes.prepare(number)
        reads = self._stripes.reads(number)
        self.bytes_read += execute(reads, on_progress=self._ranks.tell_alive)
        return count

    def _broadcast(self, broadcasts: Broadcasts) -> bytes:
        """Exchange with replicas what each of them has read."""
        self._touched |= dict.fromkeys(broadcasts.names)
        tensors = self._destinations.tensors
        self.bytes_received = broadcasts.run(tensors, self._ranks.tell_alive)
        return b""

    def _exchange(self, stripes: StripeExchange, count: int) -> None:
        """Exchange what was read in the first round, then read and exchange in turns."""
        for number in range(stripes.num_rounds):
            if number > 0:
                count = self._together_read(number)
            stripes.send(count, self._received, self._touched, self._ranks.tell_alive)

        def finish() -> bytes:
            stripes.finish()
            return b""

        together(self._ranks, "load: exchange", finish, touched=self._touched_names)
        self.bytes_received += stripes.bytes_received

    def _touched_names(self) -> list[str]:
        """Return what was overwritten of what the caller can see."""
        return self._destinations.seen(self._touched)
