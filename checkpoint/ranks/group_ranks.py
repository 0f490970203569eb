"""The ranks of a process group during one save or load."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial

from dtckpt.errors import CheckpointError, RankFailed

from ...dtensor.comm.traffic import BY_THREAD, Collective, tell_done
from .base import DEFAULT_TIMEOUT, Ranks, Round
from .call import Signs
from .failing import FAILED, OK, as_text, failure, told
from .rendezvous import Members
from .text import ranks_text
from .wire import PULSE_SECONDS

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
    ) -> None:
        super().__init__(members.rank, members.all, members.memory, wrong)
        self._wire = members.wire
        self._route = members.route
        self._timeout = timeout.total_seconds()
        self._purpose = purpose
        self._round = 0
        self._phase = purpose
        self._thread = threading.get_ident()
        self._waits = False
        self._call = call
        signs = Signs(min(self._timeout / 5, PULSE_SECONDS), _sign_of(self))
        if self.is_coordinator:
            self._wire.begin_call(call, purpose, signs, partial(_refusal, self.rank, purpose))
        else:
            link = self._route.connect(call, purpose, self._patience)
            self._wire.join_call(call, purpose, signs, link)

    @property
    def _patience(self) -> float:
        """How long a member waits for the coordinator, which has to be able to name another."""
        return self._timeout + _GRACE_SECONDS

    def begin(self, phase: str) -> None:
        self._phase, self._thread = phase, threading.get_ident()
        super().begin(phase)

    def consult(self, answer: bytes, asked: Round) -> bytes:
        number = self._round
        self._round += 1
        started = time.perf_counter()
        self._waits = True
        try:
            if self.is_coordinator:
                decision, heard = self._lead(number, answer, asked)
                others = len(self.all) - 1 - len(asked.without)
                self._tell_observers(started, len(decision) * others, heard)
            else:
                patience = asked.within + _GRACE_SECONDS if asked.within else self._patience
                decision = self._ask(number, answer, patience)
                self._tell_observers(started, len(answer), len(decision))
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

    def _ask(self, number: int, answer: bytes, patience: float) -> bytes:
        first = self.all[0]
        self._wire.send((first,), self._call, number, answer)
        found, lost = self._wire.collect(self._call, number, (first,), patience)
        if lost:
            self._route.forget()
            raise RankFailed(
                f"rank {first}, which coordinates {ranks_text(self.all)}, is lost: {lost[first]}"
            )
        return found[first]

    def _lead(self, number: int, answer: bytes, asked: Round) -> tuple[bytes, int]:
        """Return the decision and how many bytes it was made from."""
        fatal, within = asked.fatal, asked.within or self._timeout
        others = [rank for rank in self.all[1:] if rank not in asked.without]
        failed_at = time.monotonic() if fatal(answer) else None

        def is_enough(new: Mapping[int, bytes]) -> bool:
            nonlocal failed_at
            if failed_at is None and any(map(fatal, new.values())):
                failed_at = time.monotonic()
            return failed_at is not None and time.monotonic() - failed_at >= _GRACE_SECONDS

        try:
            answers, lost = self._wire.collect(self._call, number, others, within, is_enough)
            self._waits = False
            self._progress_at = time.monotonic()
            decision = asked.decide({self.rank: answer, **dict(sorted(answers.items()))}, lost)
        except BaseException as error:  # interrupted: the others must not wait for it
            decision = failure({self.rank: told(error)}, {})
            self._tell(others, number, decision)
            raise
        self._tell(others, number, decision)
        return decision, sum(map(len, answers.values()))

    def _tell(self, others: Iterable[int], number: int, decision: bytes) -> None:
        if number == 0 and decision[:1] == FAILED:
            self._wire.fail_call(self._call, decision)
        self._wire.send(others, self._call, number, decision)

    def sign(self) -> tuple[float, str] | None:
        """Return how long ago the work has got on, and what it is; None for no sign of life."""
        if self._waits:
            # Whom the coordinator waits for is found out there; a member need not be heard of.
            return (0.0, self._phase) if self.is_coordinator else None
        age = self.stalled_seconds()
        is_slow = age > self._timeout / 4
        return age, self._phase + (_standing(self._thread) if is_slow else "")

    def stalled_seconds(self) -> float:
        return 0.0 if self._waits else super().stalled_seconds()

    def is_called_off(self) -> bool:
        # Either way: the decision, or a failure, is there before this rank's answer.
        arrived = self._wire.arrived(self._call, self._round)
        return any(given[:1] != OK for given in arrived) if self.is_coordinator else bool(arrived)

    def close(self, error: BaseException | None = None) -> None:
        reason = f"it has given up: {as_text(error)}" if error is not None else ""
        self._wire.end_call(self._call, reason)

    def __del__(self) -> None:
        # Who was interrupted before it could close must not leave the others waiting. Nothing comes
        # of it for a call that has ended, or could not begin.
        self._wire.abandon(self._call)


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


def _standing(thread: int) -> str:
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
