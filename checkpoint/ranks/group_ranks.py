"""The ranks of a process group during one save or load."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from dtckpt.errors import CheckpointError, RankFailed
from dtckpt.logs import logger_of

from ...dtensor.comm.traffic import BY_THREAD, Collective, tell_done
from .base import DEFAULT_TIMEOUT, Ranks, Round
from .call import Signs, Waiting
from .failing import FAILED, OFFERED, OK, RELAYED, as_text, failure, told
from .frames import message
from .greeting import Invitation
from .relay import children_of, fetch, hello_of, is_relayed, parent_of
from .rendezvous import Members
from .text import ranks_text
from .wire import PULSE_SECONDS

logger = logger_of("checkpoint")

_INVITATIONS = (1 << 32) - 1
"""The number of the round, which no other one has, for how those are reached who hand on."""
_HAS, _ASKS = b"", b"?"
"""What a member says of a decision that is handed on."""
_LOOK_SECONDS = 1.0
"""Who waits for others within a phase looks around at least so often."""
_GRACE_SECONDS = 2.0
"""How long the others are still listened to once one rank has told of a failure."""


class GroupRanks(Ranks):
    """The ranks of a process group during one save or load.

    Raises RankFailed where the coordinator cannot be reached.
    """

    def __init__(
        self,
        members: Members,
        call: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        purpose: str = "",
        wrong: str = "",
        target: int = 0,
    ) -> None:
        super().__init__(members.rank, members.all, members.memory, wrong, call)
        self._wire = members.wire
        self._route = members.route
        self._relay = members.relay
        self._lost: dict[int, str] = {}
        """On the coordinator, who has been found to be lost between two rounds."""
        self._timeout = timeout.total_seconds()
        self._purpose = purpose
        self._round = 0
        self._phase = purpose
        self._thread = threading.get_ident()
        self._waits = False
        self._watch: Waiting | None = None
        """For the others, while the phase goes on."""
        self._watched_at = 0.0
        signs = Signs(min(self._timeout / 5, PULSE_SECONDS), _sign_of(self))
        if self.is_coordinator:
            refuse = partial(_refusal, self.rank, purpose)
            self._wire.begin_call(call, purpose, signs, refuse, target)
        else:
            link = self._route.connect(call, purpose, self._patience, target)
            host = str(link.connection.getsockname()[0])
            self._wire.join_call(call, purpose, signs, link)
            if self._relay and (invitation := self._relay.begin(call, host)):
                self._wire.send((self.all[0],), call, _INVITATIONS, invitation.to_bytes())

    @property
    def _patience(self) -> float:
        """How long a member waits for the coordinator, which has to be able to name another."""
        return self._timeout + _GRACE_SECONDS

    def begin(self, phase: str) -> None:
        self._phase, self._thread = phase, threading.get_ident()
        self._watch = None
        super().begin(phase)

    def consult(self, answer: bytes, asked: Round) -> bytes:
        number = self._round
        self._round += 1
        started = time.perf_counter()
        self._waits = True
        try:
            if self.is_coordinator:
                decision, sent, heard = self._lead(number, answer, asked)
                self._tell_observers(started, sent, heard)
            else:
                patience = asked.within + _GRACE_SECONDS if asked.within else self._patience
                decision, sent = self._ask(number, answer, patience)
                self._tell_observers(started, sent, len(decision))
        finally:
            self._waits = False
            self._progress_at = time.monotonic()
        return decision

    def _tell_observers(self, started: float, sent_bytes: int, received_bytes: int) -> None:
        """Tell those who watch the traffic what went over the wire, not counting its frames."""
        if BY_THREAD:
            agreement = Collective(
                kind="agreement",
                group=self._wire,
                ranks=self.all,
                rank=self.all.index(self.rank),
                sent_bytes=sent_bytes,
                received_bytes=received_bytes,
                agreed=self._purpose,
                started=started,
            )
            tell_done(agreement)

    def _ask(self, number: int, answer: bytes, patience: float) -> tuple[bytes, int]:
        """Return the decision and how many bytes have been sent."""
        self._wire.send((self.all[0],), self.call, number, answer)
        started = time.perf_counter()
        decision = self._from_coordinator(number, patience)
        self.waited_seconds += time.perf_counter() - started
        sent = len(answer)
        if decision[:1] in (RELAYED, OFFERED):
            self._round += 1  # in which is told who has the decision
            is_here = decision[:1] == RELAYED
            decision = decision[1:] if is_here else self._fetch(number, decision[1:], patience)
            if self._relay is not None:
                self._relay.hand_on(self.call, number, message(number, decision))
                position = self.all.index(self.rank)
                sent += len(decision) * len(children_of(position, len(self.all)))
        return decision, sent

    def _from_coordinator(self, number: int, patience: float) -> bytes:
        first = self.all[0]
        found, lost = self._wire.collect(self.call, number, (first,), patience)
        if lost:
            self._route.forget()
            raise RankFailed(
                f"rank {first}, which coordinates {ranks_text(self.all)}, is lost: {lost[first]}"
            )
        return found[first]

    def _fetch(self, number: int, word: bytes, patience: float) -> bytes:
        """Return a decision that another member hands on, or else the coordinator."""
        first = self.all[0]

        def check() -> None:
            if first in self._wire.gone(self.call):
                raise ConnectionError("the coordinator is gone")

        invitation = Invitation.from_bytes(word)
        hello = hello_of(self.rank, invitation.generation, number)
        try:
            decision = fetch(invitation, hello, self._timeout / 2, check)
        except OSError as error:
            logger.info("rank %d asks the coordinator again: %s", self.rank, error)
            self._wire.send((first,), self.call, number + 1, _ASKS)
            return self._from_coordinator(number + 1, patience)
        self._wire.send((first,), self.call, number + 1, _HAS)
        return decision

    def _lead(self, number: int, answer: bytes, asked: Round) -> tuple[bytes, int, int]:
        """Return the decision, how many bytes have been sent, and how many it was made from."""
        fatal, within = asked.fatal, asked.within or self._timeout
        others = [rank for rank in self.all[1:] if rank not in asked.without]
        failed_at = time.monotonic() if fatal(answer) else None

        def is_enough(new: Mapping[int, bytes]) -> bool:
            nonlocal failed_at
            if failed_at is None and any(map(fatal, new.values())):
                failed_at = time.monotonic()
            return failed_at is not None and time.monotonic() - failed_at >= _GRACE_SECONDS

        try:
            awaited = [rank for rank in others if rank not in self._lost]
            started = time.perf_counter()
            answers, lost = self._wire.collect(self.call, number, awaited, within, is_enough)
            self.waited_seconds += time.perf_counter() - started
            lost |= {rank: why for rank, why in self._lost.items() if rank in others}
            self._waits = False
            self._progress_at = time.monotonic()
            decision = asked.decide({self.rank: answer, **dict(sorted(answers.items()))}, lost)
        except BaseException as error:  # interrupted: the others must not wait for it
            decision = failure({self.rank: told(error)}, {})
            self._tell(others, number, decision)
            raise
        sent = self._tell(others, number, decision)
        return decision, sent, sum(map(len, answers.values()))

    def _tell(self, others: Sequence[int], number: int, decision: bytes) -> int:
        """Send a decision; return how many bytes that took, before they were packed."""
        if number == 0 and decision[:1] == FAILED:
            self._wire.fail_call(self.call, decision)
        frame = message(number, decision)
        if decision[:1] == OK and is_relayed(len(frame), len(others)):
            return self._have_relayed(others, number, decision)
        self._wire.send_frame(others, self.call, frame)
        return len(decision) * len(others)

    def _have_relayed(self, others: Sequence[int], number: int, decision: bytes) -> int:
        """Have a decision handed on, and return once all who are not lost have it."""
        self._round += 1
        self._waits = True
        gone = self._wire.gone(self.call)
        listening = self._wire.arrived(self.call, _INVITATIONS)
        places = {rank: position for position, rank in enumerate(self.all)}
        offered: dict[int, list[int]] = {}
        direct: list[int] = []
        for rank in others:
            parent = self.all[parent_of(places[rank])]
            if parent in listening and parent in others and parent not in gone:
                offered.setdefault(parent, []).append(rank)
            else:
                direct.append(rank)
        self._wire.send(direct, self.call, number, RELAYED + decision)
        sent = len(direct) * len(decision)
        for parent, ranks in offered.items():
            self._wire.send(ranks, self.call, number, OFFERED + listening[parent])
            sent += len(ranks) * len(listening[parent])
        return sent + self._await_receipts(set().union(*offered.values()), number + 1, decision)

    def _await_receipts(self, pending: set[int], number: int, decision: bytes) -> int:
        """Send a decision to those who do not get it otherwise, until nobody waits for it."""
        since = time.monotonic()
        sent = 0

        def is_asked(new: Mapping[int, bytes]) -> bool:
            return _ASKS in new.values()

        while pending:
            told, lost = self._wire.collect(
                self.call, number, pending, self._timeout, is_asked, since
            )
            asking = [rank for rank, answer in told.items() if answer == _ASKS]
            self._wire.send(asking, self.call, number, decision)
            sent += len(asking) * len(decision)
            self._lost |= lost
            pending -= told.keys() | lost.keys()
        return sent

    def sign(self) -> tuple[float, str] | None:
        """Return how long ago the work has got on, and what it is; None for no sign of life."""
        if self._waits:
            # Whom the coordinator waits for is found out there; a member need not be heard of.
            return (0.0, self._phase) if self.is_coordinator else None
        age = self.stalled_seconds()
        is_slow = age > self._timeout / 4
        return age, self._phase + (standing(self._thread) if is_slow else "")

    def stalled_seconds(self) -> float:
        return 0.0 if self._waits else super().stalled_seconds()

    def is_called_off(self) -> bool:
        # Either way: the decision, or a failure, is there before this rank's answer.
        arrived = self._wire.arrived(self.call, self._round)
        return (
            any(given[:1] != OK for given in arrived.values())
            if self.is_coordinator
            else bool(arrived)
        )

    def is_broken(self) -> bool:
        now = time.monotonic()
        if self._watch is None:
            patience = self._timeout if self.is_coordinator else self._patience
            self._watch, self._watched_at = Waiting(now, patience), now
        # Who asks seldom has other work, or was stopped; either way the others have the more time.
        self._watch.asleep += max(now - self._watched_at - _LOOK_SECONDS, 0.0)
        self._watched_at = now
        self.tell_alive()
        awaited = self.all[1:] if self.is_coordinator else self.all[:1]
        lost = self._wire.lost(self.call, awaited, self._watch)
        self._lost |= lost
        return bool(lost) or self.is_called_off()

    def close(self, error: BaseException | None = None) -> None:
        reason = f"it has given up: {as_text(error)}" if error is not None else ""
        if self._relay is not None:
            self._relay.end(self.call)
        self._wire.end_call(self.call, reason)

    def __del__(self) -> None:
        # Who was interrupted before it could close must not leave the others waiting. Nothing comes
        # of it for a call that has ended, or could not begin.
        self._wire.abandon(self.call)


def _refusal(rank: int, purpose: str, other: str) -> bytes:
    """Return the answer that counts for a rank which calls something else."""
    text = (
        f"this rank calls {other} where rank {rank} calls {purpose}. All ranks make the same "
        "calls in the same order"
    )
    return FAILED + told(CheckpointError(text))


def _sign_of(ranks: GroupRanks) -> Callable[[], tuple[float, str] | None]:
    """Return what asks for signs of life, and does not keep the ranks of a lost call alive."""
    held = weakref.ref(ranks)

    def ask() -> tuple[float, str] | None:
        found = held()
        return None if found is None else found.sign()

    return ask


_WAITING = ("threading", "selectors", "concurrent", "queue", "asyncio", "contextlib")


def standing(thread: int) -> str:
    """Return where a thread stands, for others who wait for it."""
    # Documented in spite of its name, and the only way to look at another thread.
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _WAITING:
            code = frame.f_code
            return f", in {code.co_qualname} at {code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
