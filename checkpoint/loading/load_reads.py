"""The reads of one load: each rank for itself, or once and then sent to those that want the same.

Reads alternate with collectives. All ranks agree that the reads have succeeded before they enter
one, so none waits in it for a rank that has failed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, overload

from ..ranks.together import Answers, Ranks, together
from ..reading.broadcasting import Exchange
from ..reading.exchanging import StripeExchange
from ..reading.execution import execute
from ..reading.plan import Read
from ..reading.read_once import (
    MIN_REPLICAS,
    MIN_TIMES,
    MIN_TIMES_ASKED,
    Answer,
    Shareable,
    find_shareable,
    find_spread,
)
from ..reading.read_once import fingerprint as destinations_fingerprint
from ..reading.stripes import Spread
from .load_plan import LoadPlan


class LoadReads:
    """How one rank fills its destinations."""

    def __init__(self, plan: LoadPlan, ranks: Ranks, group: Any) -> None:
        """``group`` is the process group of the load, if there are several ranks."""
        self._plan = plan
        self._ranks = ranks
        self._group = group
        self._shareable: list[Shareable] = []
        self._spread: dict[str, Spread] = {}
        self._broadcasts: Exchange | None = None
        self._stripes: StripeExchange | None = None
        self._touched: dict[str, None] = {}
        self.bytes_read = 0
        self.bytes_received = 0

    def offer_to_share(self) -> Answer:
        """Return what the other ranks must know to decide about reading once."""
        plan, ranks = self._plan, self._ranks
        asked, host = plan.options.read_once, socket.gethostname()
        if asked is False or len(ranks.all) == 1:
            return Answer(asked, host, "")
        found, tied = plan.found, plan.tied_names()
        common = {n: local for n, local in plan.tensors.items() if n not in found.own}
        untied = {name: local for name, local in common.items() if name not in tied}
        shareable = find_shareable(
            untied, found.destinations, ranks.all, 2 if asked else MIN_REPLICAS
        )
        self._spread, times = find_spread(
            untied,
            plan.manifest.tensors,
            ranks.all,
            ranks.rank,
            shareable,
            MIN_TIMES_ASKED if asked else MIN_TIMES,
        )
        self._shareable = [item for item in shareable if item.name not in self._spread]
        fingerprint = destinations_fingerprint(common, self._shareable, self._spread, sorted(tied))
        return Answer(asked, host, fingerprint, times, bool(self._shareable))

    def plan_first(self) -> None:
        """Plan all reads, unless how some tensors are read is still to be decided."""
        if not self._spread:
            self._plan.plan_reads()

    def plan_rest(self, *, read_once: bool) -> None:
        """Plan what was not planned yet, as was decided; nothing has been changed until now."""
        if not self._spread:
            return
        if read_once:
            spreads = list(self._spread.values())
            data = self._plan.data
            self._stripes = StripeExchange(data, spreads, self._group, self._ranks.all)
            self._plan.plan_reads(dict.fromkeys(self._spread, False))
        else:
            self._plan.plan_reads()

    def run(self, *, read_once: bool) -> None:
        """Fill the destinations. Collective; all ranks raise the same error."""
        ranks, touched = self._ranks, self._touched_names
        together(ranks, "load: read", lambda: self._read(read_once), touched=touched)
        if self._broadcasts is not None:
            send = partial(self._broadcast, self._broadcasts)
            together(ranks, "load: send to replicas", send, touched=touched)
        if self._stripes is not None:
            self._run_rounds(self._stripes)

    def _read(self, read_once: bool) -> bytes:
        """Read what this rank is to read; tensors without memory get it now."""
        plan = self._plan
        if plan.materialise() or (read_once and self._shareable):
            owned = dict.fromkeys(self._spread, False) if read_once else {}
            if read_once and self._shareable:
                self._broadcasts = Exchange(self._shareable, plan.tensors, self._group)
                owned |= self._broadcasts.owned()
            plan.plan_reads(owned)
        self.bytes_read = execute(_Told(plan.reads, self._ranks), touched=self._touched)
        self.bytes_read += execute(_Told(plan.comparisons, self._ranks))
        return b""

    def _broadcast(self, broadcasts: Exchange) -> bytes:
        """Exchange with replicas what each of them has read."""
        self._touched |= dict.fromkeys(broadcasts.owned())
        self.bytes_received = broadcasts.run(self._plan.tensors, self._ranks.tell_alive)
        return b""

    def _run_rounds(self, stripes: StripeExchange) -> None:
        """Read and exchange in turns."""
        ranks, touched = self._ranks, self._touched_names
        destinations = self._plan.destinations(self._spread)

        def most(answers: Answers) -> bytes:
            return b"%d" % max(map(int, answers.values()))

        for number in range(stripes.num_rounds):

            def read(number: int = number) -> bytes:
                count = stripes.prepare(number)
                self.bytes_read += execute(_Told(stripes.reads(number), ranks))
                return b"%d" % count

            count = int(together(ranks, "load: read", read, most, touched=touched))
            stripes.send(count, destinations, self._touched, ranks.tell_alive)

        def finish() -> bytes:
            stripes.finish()
            return b""

        together(ranks, "load: exchange", finish, touched=touched)
        self.bytes_received += stripes.bytes_received

    def _touched_names(self) -> list[str]:
        """Return what was overwritten of what the caller can see: not memory that is new."""
        new = {id(value) for value in self._plan.replaced.tensors.values()}
        held = self._plan.found.destinations
        return [name for name in self._touched if id(held.get(name)) not in new]


class _Told(Sequence[Read]):
    """Reads; whoever takes one shows that this rank is alive."""

    def __init__(self, reads: list[Read], ranks: Ranks) -> None:
        self._reads = reads
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._reads)

    @overload
    def __getitem__(self, index: int) -> Read: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Read]: ...
    def __getitem__(self, index: int | slice) -> Read | Sequence[Read]:
        return self._reads[index]

    def __iter__(self) -> Iterator[Read]:
        return map(self._tell, self._reads)  # which several threads may advance

    def _tell(self, read: Read) -> Read:
        self._ranks.tell_alive()
        return read
