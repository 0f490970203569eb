"""Messages between the coordinator of a group and its members, with deadlines.

Every save or load is a *job*, for which every member connects to the coordinator anew: between two
of them nothing is held that could break. A rank that dies closes its connection, so it is missed at
once; one that falls silent, or whose work does not get on, is missed after a deadline; and nothing
here touches the process group, so a save may go on in the background while the training uses it.

Members connect when they come to the job, which may be before the coordinator does. It takes them
in the order in which they came.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from .frames import END, MESSAGE, SIGN, end, message, read_sign, sign
from .greeting import Hello, Listener
from .link import Link
from .loop import Loop

_LOOK_SECONDS = 0.5
"""How often a wait looks around, though nothing has arrived."""
_MAX_EARLY = 8
"""So many calls a member may be ahead of the coordinator."""
PULSE_SECONDS = 5.0
"""Signs of life come at least so often."""

Answers = dict[int, bytes]
Refuse = Callable[[str], bytes]
"""Makes the answer that counts for a rank which calls something else."""


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of life that this rank shows during a job."""

    seconds: float
    """How often."""
    ask: Callable[[], tuple[float, str] | None]
    """How long ago this rank's work has got on, and what it is; None to show no sign of life."""


@dataclass(slots=True)
class _Job:
    """What has been heard of one save or load."""

    purpose: str
    signs: Signs
    refuse: Refuse = lambda _: b""
    sign_at: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    awaited: set[int] = field(default_factory=set[int])
    """Members that have not connected for it yet."""
    links: dict[int, Link] = field(default_factory=dict[int, Link])
    rounds: dict[int, Answers] = field(default_factory=dict[int, Answers])
    heard: dict[int, float] = field(default_factory=dict[int, float])
    """When the work of a peer has got on last, as far as it has told."""
    seen: dict[int, float] = field(default_factory=dict[int, float])
    """When anything came from it."""
    doing: dict[int, str] = field(default_factory=dict[int, str])
    gone: dict[int, str] = field(default_factory=dict[int, str])
    """Whose connection has ended, or who has left, and why."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A job that failed before some members came to it; they still learn of it when they do."""

    job: _Job
    frames: tuple[bytes, ...]
    until: float


class Wire:
    """The connections of one rank: the coordinator's to all members, a member's to it alone."""

    def __init__(self, members: Iterable[int] = (), listener: Listener | None = None) -> None:
        self._members = frozenset(members)
        """On the coordinator, all others."""
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self._early: dict[int, deque[Link]] = {}
        """Members that have come to a job that the coordinator has not begun."""
        self._failed: list[_Failed] = []
        self._changed = threading.Condition()
        self._loop = Loop(listener)
        self._loop.start(self)

    def begin_job(self, purpose: str, signs: Signs, refuse: Refuse = lambda _: b"") -> int:
        """Begin a job as the coordinator and return its number.

        The answer of a member that is at another call is what ``refuse`` makes of its purpose.
        """
        with self._changed:
            held = _Job(purpose, signs, refuse, awaited=set(self._members))
            for rank in [rank for rank, links in self._early.items() if links]:
                self._admit(held, self._early[rank].popleft())
            number = self._add(held)
        self._loop.wake()
        return number

    def join_job(self, purpose: str, signs: Signs, link: Link) -> int:
        """Begin a job as a member that has connected to the coordinator; return its number."""
        with self._changed:
            held = link.job = _Job(purpose, signs, links={link.rank: link})
            number = self._add(held)
        self._loop.look_at(link)
        return number

    def _add(self, held: _Job) -> int:
        number = self._next_job
        self._next_job += 1
        self._jobs[number] = held
        held.sign_at = time.monotonic() + held.signs.seconds
        return number

    def meet(self, hello: Hello, connection: socket.socket) -> None:
        """Take a member that has connected, for the job that has waited for it the longest."""
        link = Link(hello.rank, connection, purpose=hello.purpose)
        with self._changed:
            if hello.rank not in self._members:
                connection.close()
                return
            self._loop.look_at(link)
            if hello.given_up > 0:
                self._note_given_up(link.rank, time.monotonic() - hello.given_up)
            if (failed := self._failed_for(link)) is not None:
                for frame in failed.frames:
                    self._send_to(link, frame)
                self._finish(link)
                return
            for held in self._jobs.values():
                if link.rank in held.awaited:
                    self._admit(held, link)
                    self._changed.notify_all()
                    return
            waiting = self._early.setdefault(link.rank, deque())
            waiting.append(link)
            if len(waiting) > _MAX_EARLY:
                self._finish(waiting.popleft())

    def _note_given_up(self, rank: int, when: float) -> None:
        """Take out of earlier jobs a member that could not tell that it had left them."""
        for held in (*self._jobs.values(), *(entry.job for entry in self._failed)):
            if rank in held.awaited and held.begun < when:
                held.awaited.discard(rank)
                held.gone[rank] = "it has given up: it could not reach this rank in time"
                self._changed.notify_all()

    def _failed_for(self, link: Link) -> _Failed | None:
        now = time.monotonic()
        self._failed = [entry for entry in self._failed if entry.until > now and entry.job.awaited]
        for entry in self._failed:
            if link.rank in entry.job.awaited and link.purpose == entry.job.purpose:
                entry.job.awaited.discard(link.rank)
                return entry
        return None

    def _admit(self, held: _Job, link: Link) -> None:
        """Let a member take part in a job."""
        rank = link.rank
        held.awaited.discard(rank)
        held.links[rank] = link
        held.heard[rank] = held.seen[rank] = time.monotonic()
        link.job = held
        if link.purpose != held.purpose:
            held.rounds.setdefault(0, {})[rank] = held.refuse(link.purpose)
        for frame in link.early:
            self._keep(held, rank, *frame)
        link.early.clear()
        if link.lost:
            held.gone.setdefault(rank, link.lost)
        self._send_to(link, sign(0.0))  # it may have waited for long

    def end_job(
        self, job: int, reason: str, decision: bytes | None = None, until: float = 0.0
    ) -> None:
        """Forget a job, and tell the peers; ``reason`` matters to those who are still at it.

        ``decision`` is what members that have not come yet are told until some time.
        """
        last = end(reason)
        with self._changed:
            held = self._jobs.pop(job, None)
            if held is None:
                return
            if held.awaited and until > time.monotonic():
                told = () if decision is None else (message(0, decision),)
                self._failed.append(_Failed(held, (*told, last), until))
            for link in held.links.values():
                self._send_to(link, last)
                self._finish(link)

    def _finish(self, link: Link) -> None:
        link.end_sending()
        self._loop.look_at(link)

    def send(self, ranks: Iterable[int], job: int, number: int, payload: bytes) -> None:
        """Send a message of round ``number`` to those of the ranks that have come."""
        frame = message(number, payload)
        with self._changed:
            links = self._jobs[job].links
            found = [links[rank] for rank in ranks if rank in links]
        for link in found:
            self._send_to(link, frame)

    def _send_to(self, link: Link, frame: bytes) -> None:
        try:
            link.send(frame)
        except OSError:
            # What it has sent before, why it left perhaps, is still to be read, and then its end.
            self._loop.look_at(link)
        if link.is_behind:
            self._loop.look_at(link)

    def beat(self) -> float | None:
        """Show the signs of life that are due; return the seconds until the next one."""
        now = time.monotonic()
        with self._changed:
            due = [held for held in self._jobs.values() if held.sign_at <= now]
            for held in due:
                held.sign_at = now + held.signs.seconds
            pause = min((held.sign_at - now for held in self._jobs.values()), default=None)
        for held in due:
            told = held.signs.ask()
            if told is None:
                continue
            frame = sign(*told)
            for link in list(held.links.values()):
                if not link.is_behind:  # it has other things to read first
                    self._send_to(link, frame)
        return pause

    def lose(self, link: Link, reason: str) -> None:
        """Note that nothing more can come from a peer."""
        with self._changed:
            link.lost = link.lost or reason
            if link.job is not None:
                link.job.gone.setdefault(link.rank, reason)
                self._changed.notify_all()

    def take(self, link: Link) -> None:
        """Keep what has arrived for the job that waits for it, or will."""
        frames = link.read()
        with self._changed:
            if link.job is not None:
                for frame in frames:
                    self._keep(link.job, link.rank, *frame)
                if any(frame.kind != SIGN for frame in frames):
                    self._changed.notify_all()
                return
            link.early += [frame for frame in frames if frame.kind != SIGN]
            if any(frame.kind == END for frame in frames):  # it has given up waiting
                with suppress(ValueError, KeyError):
                    self._early[link.rank].remove(link)
                self._finish(link)

    def _keep(self, held: _Job, rank: int, kind: int, number: int, payload: bytes) -> None:
        held.heard[rank] = held.seen[rank] = time.monotonic()
        if kind == MESSAGE:
            held.rounds.setdefault(number, {}).setdefault(rank, payload)
        elif kind == END:
            left = payload.decode(errors="replace")
            held.gone.setdefault(rank, left or "it has ended this save or load")
        else:
            age, doing = read_sign(payload)
            held.heard[rank] -= age
            held.doing[rank] = doing

    def collect(
        self,
        job: int,
        number: int,
        ranks: Iterable[int],
        timeout: float,
        is_enough: Callable[[Answers], bool] = lambda _: False,
    ) -> tuple[Answers, dict[int, str]]:
        """Wait for the messages of some ranks; return them, and who is lost with the reason.

        A rank is lost when its connection is, when it has left the job, or when for ``timeout``
        seconds in which this process was awake it has not come, has sent nothing, or its work has
        not got on. ``is_enough``, asked with what is new, may end the wait early.
        """
        start = time.monotonic()
        pending = set(ranks)
        answers: Answers = {}
        pause = min(timeout / 4, _LOOK_SECONDS)
        expected, asleep = start, 0.0
        while True:
            with self._changed:
                now = time.monotonic()
                if now - expected > 1.0:  # this process was stopped, or had no processor
                    asleep += now - expected
                held = self._jobs[job]
                new = {
                    r: held.rounds[number][r] for r in held.rounds.get(number, {}) if r in pending
                }
                answers |= new
                pending -= new.keys()
                lost, wake = _lost(held, pending, start, timeout, asleep, now, now + pause)
                if len(lost) == len(pending) or is_enough(new):
                    held.rounds.pop(number, None)
                    return answers, lost
                expected = max(wake, now)
                self._changed.wait(max(wake - now, 0.001))

    def give_up(self, job: int, ranks: Iterable[int]) -> None:
        """Note that ranks will not come to a job any more; when they call, it is another one."""
        with self._changed:
            self._jobs[job].awaited.difference_update(ranks)

    def arrived(self, job: int, number: int) -> list[bytes]:
        """Return the messages of a round that are there already."""
        with self._changed:
            held = self._jobs.get(job)
            return list(held.rounds.get(number, {}).values()) if held is not None else []

    def close(self) -> None:
        """End all connections."""
        self._loop.stop()

    def __del__(self) -> None:
        self.close()


def _lost(
    held: _Job,
    pending: Iterable[int],
    start: float,
    timeout: float,
    asleep: float,
    now: float,
    wake: float,
) -> tuple[dict[int, str], float]:
    """Return who is lost, and when to look again."""
    lost: dict[int, str] = {}
    first = start + timeout + asleep
    if not held.gone and now < first:
        return lost, min(wake, first)  # nobody can be; there may be thousands
    for rank in pending:
        limit = max(start, held.heard.get(rank, start)) + timeout + asleep
        if rank in held.gone:
            lost[rank] = held.gone[rank]
        elif now >= limit:
            lost[rank] = _why_lost(held, rank, timeout, now)
        else:
            wake = min(wake, limit)
    return lost, wake


def _why_lost(held: _Job, rank: int, timeout: float, now: float) -> str:
    if rank not in held.seen:
        at = held.purpose or "call"
        return (
            f"it showed no sign of life within {timeout:g} s: it has not come to this {at}. All "
            "ranks make the same calls in the same order"
        )
    doing = held.doing.get(rank, "")
    if now - held.seen[rank] < timeout / 2:
        return f"it lives, but has not got on within {timeout:g} s: {doing or 'it does not say'}"
    at = f"; it was last heard of at {doing}" if doing else ""
    return f"it showed no sign of life within {timeout:g} s{at}"
