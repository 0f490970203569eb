"""Compares every collective across its ranks before it is issued, so that none waits for ever.

Each rank writes what it is about to issue into a store that all ranks share, and waits until every
rank of the group has written: under the same number, since collectives of a group come in one
order. If all are equal the collective is issued. If not, or if some rank does not come, every
rank that takes part raises, and its error says what each of them was doing, and where.

That a rank does not come shows in one of three ways. It has left the block, of itself or by an
exception. It waits for a rank that, perhaps by way of others, waits for it: then nobody will ever
come. (That cannot be known of ranks with several threads that issue collectives.) Or it has not
come in time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from dtckpt.errors import CollectiveMismatch

from ..comm.groups import name_of
from ..comm.traffic import Collective, Observer, add_observer, call_site, remove_observer
from ..torch_private import job_store
from .module_tracker import mark_thread
from .pending import Pending, told_divergence

DEFAULT_TIMEOUT = timedelta(minutes=2)
"""How long a rank may take to its next collective while others wait for it there."""
SECONDS_VARIABLE = "DTCKPT_CHECK_SECONDS"
"""Environment variable with another number of seconds."""

_LOOK_SECONDS = 0.5
"""How long a rank waits before it looks what the missing ones do, and between such looks."""
_LONGEST_NAP = 0.01
_TO_TELL = timedelta(seconds=10)

Told = tuple[str, tuple[int, ...]]
"""What is wrong, and the ranks that it is about."""
Circle = frozenset[tuple[int, int]]
"""Ranks that wait for each other, with the number of the collective that each is at."""


@contextmanager
def checking_collectives(*, store: Any = None, timeout: timedelta | None = None) -> Generator[None]:
    """Within it, every collective of this thread is compared across its ranks before it is issued.

    All ranks enter it. Where they are about to issue different collectives over a group, or some
    rank does not come within ``timeout`` (2 minutes, or ``DTCKPT_CHECK_SECONDS``), those that wait
    raise CollectiveMismatch, which names the ranks that diverge and their lines of code. The other
    ranks raise it at their next collective.

    The ranks compare over ``store``, by default that of torch.distributed; ranks that are threads
    give one of theirs. It costs some messages to the store for each collective. Saves and loads
    look after their own agreements and are not delayed; what they send over the group is compared.

    ``DTCKPT_CHECK_COLLECTIVES=1`` in the environment does the same for a whole job.
    """
    shared = store if store is not None else job_store()
    if shared is None:
        raise ValueError(
            "there is no store over which to compare collectives: initialise torch.distributed, or "
            "pass store="
        )
    checker = CollectiveChecker(shared, timeout or timeout_of_environment())
    mark_thread()
    add_observer(checker)
    try:
        yield
    except BaseException as error:
        checker.leave(f"left by {type(error).__name__}: {error}")
        raise
    else:
        checker.leave("left checking_collectives()")
        if not checker.has_raised:
            checker.raise_if_aborted()
    finally:
        remove_observer(checker)


def timeout_of_environment() -> timedelta:
    """Return the timeout that the environment names, or the default."""
    given = os.environ.get(SECONDS_VARIABLE)
    if not given:
        return DEFAULT_TIMEOUT
    try:
        return timedelta(seconds=float(given))
    except ValueError:
        raise ValueError(f"{SECONDS_VARIABLE} is a number of seconds, got {given!r}") from None


class CollectiveChecker(Observer):
    """One rank's part in the comparison."""

    def __init__(self, store: Any, timeout: timedelta) -> None:
        self._store = store
        self._timeout = timeout.total_seconds()
        self._numbers: Counter[str] = Counter()
        self._threads: set[int] = set()
        self._prefix = ""
        self._rank = -1
        self._count = 0
        self._last: Pending | None = None
        self.has_raised = False

    def before(self, collective: Collective) -> None:
        """Compare a collective with what the other ranks are about to issue."""
        if len(collective.ranks) == 1:
            return
        self._join(collective.ranks[collective.rank])
        self.raise_if_aborted()
        ranks, lane = collective.ranks, _lane(collective)
        number = self._numbers[lane]
        self._numbers[lane] += 1
        self._count += 1
        self._threads.add(threading.get_ident())
        own = Pending(
            kind=collective.kind,
            reduce_op=collective.reduce_op,
            agreed=collective.agreed,
            ranks=ranks,
            sent_to=collective.sent_to,
            received_from=collective.received_from,
            lane=lane,
            number=number,
            count=self._count,
            threads=len(self._threads),
            site=call_site(),
        )
        self._last = own
        key = self._key(lane, number)
        text = own.to_json()
        self._store.set(f"{self._prefix}/at/{self._rank}", text)
        self._store.set(f"{key}/{self._rank}", text)
        same = f"{key}/same/{own.fingerprint}"
        num_same = self._store.add(same, 1)
        if self._store.add(f"{key}/all", 1) < len(ranks):
            self._wait(key, own)
        if num_same < len(ranks):
            num_same = self._store.add(same, 0)
        if num_same != len(ranks):
            self._abort(told_divergence(self._pending_of_all(key, ranks)))
        if collective.sent_to:
            self._check_sizes(key, collective)
        self._forget(number - 2, own)

    def _join(self, rank: int) -> None:
        """Number this block among those of this rank, so that it meets no keys of earlier ones."""
        if self._rank < 0:
            self._rank = rank
            block = self._store.add(f"dtckpt/check/blocks/{self._rank}", 1)
            self._prefix = f"dtckpt/check/{block}"

    def _key(self, lane: str, number: int) -> str:
        return f"{self._prefix}/{lane}/{number}"

    def _wait(self, key: str, own: Pending) -> None:
        """Wait until all ranks of a collective have come; raise where one will not."""
        started = time.monotonic()
        look_at, nap = started + _LOOK_SECONDS, 1e-5
        circle: Circle = frozenset()
        while self._store.add(f"{key}/all", 0) < len(own.ranks):
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_NAP)
            now = time.monotonic()
            if now < look_at:
                continue
            look_at = now + _LOOK_SECONDS
            self.raise_if_aborted()
            missing = self._missing(key, own.ranks)
            gone = [r for r in missing if (s := self._pending_of(r)) is not None and s.left]
            before, circle = circle, self._circle(missing)
            if not missing:  # the last one has come just now
                continue
            if gone:
                self._abort(self._told_missing(own, missing, "will not come any more"))
            if circle and circle == before:
                self._abort(self._told_missing(own, missing, "can only come after it"))
            if now - started > self._timeout:
                told = f"did not come within {self._timeout:g} s"
                self._abort(self._told_missing(own, missing, told))

    def _missing(self, key: str, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"{key}/{rank}"])]

    def _circle(self, missing: Sequence[int]) -> Circle:
        """Return the ranks by way of which missing ones wait for this rank; none if they do not.

        A rank waits for all that are missing at its collective, so any circle is a deadlock, but
        for what was read of a rank that went on meanwhile. It is one for certain when it is seen
        again with every rank where it was.
        """
        found: dict[int, Circle] = {rank: frozenset() for rank in missing}
        pending = list(missing)
        while pending:
            rank = pending.pop()
            theirs = self._pending_of(rank)
            if theirs is None or theirs.left:
                continue
            if max(theirs.threads, len(self._threads)) > 1:  # another one may come there
                continue
            path = found[rank] | {(rank, theirs.count)}
            for other in self._missing(self._key(theirs.lane, theirs.number), theirs.ranks):
                if other == self._rank:
                    return path
                if other not in found:
                    found[other] = path
                    pending.append(other)
        return frozenset()

    def _pending_of(self, rank: int) -> Pending | None:
        """Return what a rank has last been about to issue, None where it has never been."""
        key = f"{self._prefix}/at/{rank}"
        return Pending.from_json(self._store.get(key)) if self._store.check([key]) else None

    def _pending_of_all(self, key: str, ranks: Sequence[int]) -> dict[int, Pending]:
        return {rank: Pending.from_json(self._store.get(f"{key}/{rank}")) for rank in ranks}

    def _told_missing(self, own: Pending, missing: Sequence[int], why: str) -> Told:
        listed = ", ".join(map(str, missing))
        verb = f"ranks {listed}" if len(missing) > 1 else f"rank {listed}"
        lines = [f"rank {self._rank} is at {own}, to which {verb} {why}."]
        for rank in missing:
            other = self._pending_of(rank)
            doing = "has issued no collective here yet" if other is None else other.doing()
            lines.append(f"rank {rank} {doing}")
        return "\n  ".join(lines), tuple(missing)

    def _check_sizes(self, key: str, collective: Collective) -> None:
        """Compare what every rank sends with what each expects, for exchanges of uneven sizes."""
        pending = self._pending_of_all(key, collective.ranks)
        lines: list[str] = []
        ranks: set[int] = set()
        for i, sender in pending.items():
            for j, receiver in pending.items():
                sent = sender.sent_to[collective.ranks.index(j)]
                expected = receiver.received_from[collective.ranks.index(i)]
                if sent != expected:
                    ranks |= {i, j}
                    lines.append(
                        f"rank {i} sends {sent} bytes to rank {j}, which expects {expected}: "
                        f"{sender.site} and {receiver.site}"
                    )
        if lines:
            shown = "\n  ".join(lines[:8])
            head = f"{pending[collective.ranks[0]]}: sizes do not fit"
            self._abort((f"{head}\n  {shown}", tuple(sorted(ranks))))

    def _forget(self, number: int, own: Pending) -> None:
        """Delete what was compared some time ago: whoever is here has long read it."""
        if number < 0:
            return
        key = self._key(own.lane, number)
        text = self._store.get(f"{key}/{self._rank}")
        self._store.delete_key(f"{key}/{self._rank}")
        if self._rank == own.ranks[0]:
            fingerprint = Pending.from_json(text).fingerprint
            self._store.delete_key(f"{key}/same/{fingerprint}")
            self._store.delete_key(f"{key}/all")

    def _abort(self, told: Told) -> None:
        """Let all ranks know, and raise; what was found first if another one was quicker."""
        text, ranks = told
        key = f"{self._prefix}/aborted"
        if self._store.add(f"{key}/count", 1) == 1:
            self._store.set(key, json.dumps({"text": text, "ranks": ranks}))
        else:
            with suppress(Exception):  # it may have died before it could say more
                self._store.wait([key], _TO_TELL)
            self.raise_if_aborted()
        self._raise(text, ranks)

    def raise_if_aborted(self) -> None:
        """Raise what another rank has found."""
        key = f"{self._prefix}/aborted"
        if self._prefix and self._store.check([key]):
            found = json.loads(self._store.get(key))
            self._raise(found["text"], tuple(found["ranks"]))

    def _raise(self, text: str, ranks: tuple[int, ...]) -> None:
        self.has_raised = True
        error = CollectiveMismatch(text)
        error.ranks = ranks
        raise error

    def leave(self, how: str) -> None:
        """Let the others know that this rank issues no more collectives here."""
        if self._last is None and dist.is_initialized():
            self._join(dist.get_rank())
            self._last = Pending()
        if self._last is not None:
            self._store.set(f"{self._prefix}/at/{self._rank}", self._last.leaving(how).to_json())


def _lane(collective: Collective) -> str:
    """Return a short name for a group, the same on all of its ranks, which may be thousands."""
    facts = f"{name_of(collective.group)} of {','.join(map(str, collective.ranks))}"
    return blake2b(facts.encode(), digest_size=12).hexdigest()
