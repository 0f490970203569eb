"""Messages between the coordinator of a group and its members, with deadlines.

Every save or load is a *call*, for which every member connects to the coordinator anew: between two
of them nothing is held that could break. A rank that dies closes its connection, so it is missed at
once; one that falls silent, or whose work does not get on, is missed after a deadline; and nothing
here touches the process group, so a save may go on in the background while the training uses it.

Members connect when they come to a call, which may be before the coordinator does, or long after.
Every rank numbers its calls, and who comes says the number, so nobody is taken for another call.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from .call import Call, CallNumbers, Refuse, Signs, Waiting, lost_of
from .failing import Departure
from .frames import END, MESSAGE, SIGN, end, message, read_sign, sign
from .greeting import Hello, Listener
from .link import Link
from .loop import Loop, Owner

_LOOK_SECONDS = 0.5
"""How often a wait looks around, though nothing has arrived."""
_MAX_EARLY = 8
"""Of so many calls that the coordinator has not begun it keeps a member's connection."""
_AHEAD_SECONDS = 2.0
"""How long a member that is a call ahead may take to come to it, once this rank has come to its."""
_MAX_FAILURES = 16
"""Of so many calls it is remembered how they failed."""
_UNPLACED_SECONDS = 10.0
"""How long a member is kept whose call was made for something else here, until the next call."""
_UNDECIDED_SECONDS = 0.5
"""How long it is waited whether a member leaves its call, or comes again, before it takes part in
one that is for something else: what it has sent may not have been read yet."""
_MAX_TARGETS = 64
"""Of so many calls here it is remembered what they were made for."""
_MAX_CAME_FOR = 8
"""Of so many calls of each member; there may be ten thousands of members."""
PULSE_SECONDS = 5.0
"""Signs of life come at least so often."""


class Wire(Owner):
    """The connections of one rank: the coordinator's to all members, a member's to it alone.

    Jobs go by the number of the call, which is the same on all ranks.
    """

    def __init__(
        self,
        members: Iterable[int] = (),
        listener: Listener | None = None,
        numbers: CallNumbers | None = None,
    ) -> None:
        self._members = frozenset(members)
        """On the coordinator, all others."""
        self._numbers = numbers or CallNumbers()
        self._calls: dict[int, Call] = {}
        self._next_call = 0
        """The lowest number of a call that may still begin; who comes to a later one waits."""
        self._early: dict[int, dict[int, Link]] = {}
        """By call, the members that have come to one that has not begun here."""
        self._came_to: dict[int, int] = {}
        """The last call that a member has come to, or is to leave out."""
        self._late_at: dict[int, int] = {}
        """The last call that a member has come to when it was over."""
        self._left_at: dict[int, int] = {}
        """The last call that a member had left, for good or for another one, when it failed."""
        self._instances: dict[int, int] = {}
        """Which instance of a member has come first."""
        self._targets: dict[int, int] = {}
        """What the last calls here were made for."""
        self._came_for: dict[int, dict[int, int]] = {}
        """By member, what the last calls were made for that it has come to."""
        self._unplaced: dict[int, tuple[Link, float]] = {}
        """By member, the connection for a call that had another target here, and until when it is
        kept for the next one."""
        self._failures: dict[int, bytes] = {}
        """By call, the decision for members that come to it when it has failed."""
        self._failure = ""
        """Why nothing can come from anybody any more."""
        self._abandoned: deque[int] = deque()
        self._changed = threading.Condition()
        self._loop = Loop(listener)
        self._loop.start(self)

    def begin_call(
        self,
        call: int,
        purpose: str,
        signs: Signs,
        refuse: Refuse = lambda _: b"",
        target: int = 0,
    ) -> None:
        """Begin a call as the coordinator.

        The answer of a member that is at another call is what ``refuse`` makes of its purpose.
        ``target`` is what the call is made for, by `call.target_number`; 0 where that is unknown.
        """
        with self._changed:
            made = Call(call, purpose, signs, refuse, target, awaited=set(self._members))
            held = self._add(call, made)
            self._next_call = max(self._next_call, call + 1)
            _remember(self._targets, call, target, _MAX_TARGETS)
            for link in self._early.pop(call, {}).values():
                self._place(held, link)
            for number in sorted(self._early):  # the nearest one first
                for link in [*self._early[number].values()]:
                    if self._is_for(held, link):
                        del self._early[number][link.rank]
                        self._admit(held, link)
            for link, _ in [*self._unplaced.values()]:
                if self._is_for(held, link):
                    del self._unplaced[link.rank]
                    self._admit(held, link)
                elif link.call < call:
                    self._give_up(link)
            for rank in [r for r in held.awaited if self._came_to.get(r, -1) >= call]:
                self._miss(held, rank, call, self._came_to[rank])
            self._dismiss_early()
        self._loop.wake()

    def join_call(self, call: int, purpose: str, signs: Signs, link: Link) -> None:
        """Begin a call as a member that has connected to the coordinator."""
        with self._changed:
            held = Call(call, purpose, signs, links={link.rank: link})
            link.part_of = self._add(call, held)
        self._loop.look_at(link)

    def _add(self, call: int, held: Call) -> Call:
        self._calls[call] = held
        held.begun = time.monotonic()
        held.sign_at = held.begun + held.signs.seconds
        return held

    def is_known(self, hello: Hello) -> bool:
        """Whether somebody who knows the token is the member that it says it is.

        Another instance of it belongs to another group of this name, or has been started anew.
        """
        with self._changed:
            if hello.rank not in self._members:
                return False
            return self._instances.setdefault(hello.rank, hello.instance) == hello.instance

    def meet(self, hello: Hello, connection: socket.socket) -> None:
        rank, call = hello.rank, hello.call
        link = Link(rank, connection, call=call, purpose=hello.purpose, target=hello.target)
        with self._changed:
            self._loop.look_at(link)
            _remember(self._came_for.setdefault(rank, {}), call, hello.target, _MAX_CAME_FOR)
            held = self._calls.get(call)
            is_usual = held is not None and rank in held.awaited and held.target == link.target
            if not is_usual:
                others = sorted(self._calls.items())
                held = next((h for _, h in others if self._is_for(h, link)), held)
            at = call if held is None else held.number
            self._came_to[rank] = max(at, self._came_to.get(rank, at))
            for number, other in self._calls.items():
                if number < at and rank in other.awaited:
                    self._miss(other, rank, number, at)
            if held is not None and rank in held.awaited:
                self._place(held, link)
            elif call >= self._next_call:
                self._keep_early(link)
            elif self._is_of_another(link):
                self._keep_unplaced(link)
            else:
                self._dismiss_late(link)
            self._changed.notify_all()

    def _is_of_another(self, link: Link) -> bool:
        """Whether all calls here from the member's number on were made for something else.

        So it is where a member has made a call less than this rank: its number is of another call.
        Of a call that was made for nothing that has a name it is not known, as of one that was
        given a wrong argument.
        """
        begun = [number for number in self._targets if number >= link.call]
        return (
            link.target != 0
            and link.call >= min(self._targets, default=0)
            and all(self._targets[number] not in (0, link.target) for number in begun)
        )

    def _is_for(self, held: Call, link: Link) -> bool:
        """Whether a member that gives another number to a call means this one nevertheless.

        The targets are the same, and no call between the two numbers had this target: else the
        member might be late for that one, with another state, or this rank might.
        """
        if held.number == link.call or held.target != link.target or held.target == 0:
            return False
        if link.rank not in held.awaited or _has_left(link):
            return False
        is_behind = link.call < held.number
        targets = self._targets if is_behind else self._came_for[link.rank]
        between = range(*sorted((link.call, held.number)))
        if between[0] < min(targets, default=0):
            return False
        # This rank has begun no call of a number that is missing; a member may have.
        missing = 0 if is_behind else held.target
        return all(targets.get(number, missing) != held.target for number in between)

    def _place(self, held: Call, link: Link) -> None:
        """Let a member take part in the call of its number, if it has not mistaken the number.

        It has if it comes now to what this rank alone has called for before, or if it alone has
        come before to what this rank calls for now.
        """
        if link.target == held.target or 0 in (link.target, held.target):
            self._admit(held, link)
            return
        has_left = _has_left(link) or self._came_to[link.rank] > held.number
        ours = {target for call, target in self._targets.items() if call != held.number}
        theirs = {t for call, t in self._came_for[link.rank].items() if call != held.number}
        if has_left or link.target in ours - theirs:
            self._came_to[link.rank] = held.number - 1  # it comes to this one by its next number
            self._dismiss(link, 0)
        elif held.target in theirs - ours:
            self._miss(held, link.rank, held.number, link.call + 1)
            self._keep_unplaced(link)
        else:
            self._came_to[link.rank] = held.number - 1  # it may still come to this one
            self._keep_unplaced(link, _UNDECIDED_SECONDS)

    def _keep_unplaced(self, link: Link, seconds: float = _UNPLACED_SECONDS) -> None:
        if link.rank in self._unplaced:
            self._finish(self._unplaced[link.rank][0])
        self._unplaced[link.rank] = link, time.monotonic() + seconds

    def _decide(self, link: Link) -> None:
        """Have a member that has been waited for take part after all, or leave."""
        held = self._calls.get(link.call)
        if held is None or link.rank not in held.awaited:
            self._give_up(link)
            return
        del self._unplaced[link.rank]
        if _has_left(link):
            self._dismiss(link, 0)
        else:
            self._came_to[link.rank] = held.number
            self._admit(held, link)
        self._changed.notify_all()

    def _give_up(self, link: Link) -> None:
        """Tell a member that this rank does not come to its call."""
        del self._unplaced[link.rank]
        self._dismiss_late(link)

    def _dismiss_late(self, link: Link) -> None:
        rank, call = link.rank, link.call
        is_behind = self._late_at.get(rank) == call - 1
        self._late_at[rank] = call
        self._dismiss(link, self._skip_with(rank) if is_behind else 0)

    def _keep_early(self, link: Link) -> None:
        before = self._early.setdefault(link.call, {}).pop(link.rank, None)
        self._early[link.call][link.rank] = link
        held = [call for call, links in self._early.items() if link.rank in links]
        if len(held) > _MAX_EARLY:
            before = self._early[min(held)].pop(link.rank)
        if before is not None:
            self._finish(before)

    def _skip_with(self, rank: int) -> int:
        """Return the next call of a member that is always late by one, and miss it in those before.

        It has come to an earlier one when all others came to the one that is under way, or next.
        """
        awaiting = [number for number, held in self._calls.items() if rank in held.awaited]
        next_call = self._next_call + (not awaiting)
        for number in awaiting:
            self._miss(self._calls[number], rank, number, self._came_to[rank])
        self._came_to[rank] = next_call - 1
        return next_call

    def _dismiss(self, link: Link, next_call: int) -> None:
        """Tell a member that its call is over, how it failed, and which it may come to next."""
        if link.call in self._failures:
            self._send_to(link, self._failures[link.call])
        self._send_to(link, end(f"it has left call {link.call} over this group", next_call))
        self._finish(link)

    def _dismiss_early(self) -> None:
        for call in sorted(call for call in self._early if call < self._next_call):
            for link in self._early.pop(call).values():
                self._dismiss(link, self._next_call)

    def _miss(self, held: Call, rank: int, number: int, call: int) -> None:
        """Note that a member will not come to a call, since it is at another one."""
        held.awaited.discard(rank)
        held.strayed.add(rank)
        held.gone[rank] = Departure(
            f"it was at call {call} over this group when the first rank was at call {number}: it "
            "has left that one, or not all ranks have made the same calls in the same order"
        )

    def _admit(self, held: Call, link: Link) -> None:
        """Let a member take part in a call."""
        rank = link.rank
        if link.call != held.number:
            self._agree_on_next(held, link.call)
        held.awaited.discard(rank)
        held.links[rank] = link
        held.heard[rank] = held.seen[rank] = time.monotonic()
        link.part_of = held
        if link.purpose != held.purpose:
            held.rounds.setdefault(0, {})[rank] = held.refuse(link.purpose)
        while link.early:
            self._keep(held, rank, *link.early.pop(0))
        if link.lost:
            held.gone.setdefault(rank, link.lost)
        if rank in held.gone:
            held.strayed.add(rank)
        self._send_to(link, sign(0.0))  # it may have waited for long
        if held.next_call > link.call + 1:
            self._send_to(link, sign(0.0, next_call=held.next_call))

    def _agree_on_next(self, held: Call, call: int) -> None:
        """Have all ranks go on with one number, of which one has numbered a call otherwise."""
        next_call = max(held.number, call) + 1
        if next_call <= held.next_call:
            return
        held.next_call = next_call
        self._next_call = max(self._next_call, next_call)
        self._numbers.skip_to(next_call)
        for link in held.links.values():
            self._send_to(link, sign(0.0, next_call=next_call))

    def fail_call(self, call: int, decision: bytes) -> None:
        """Note that the first round has failed: who comes to it from now on is told so.

        A member that was ahead again, as in the call before, has made a call more than this rank.
        All ranks go on with one that none has come to yet.
        """
        with self._changed:
            held = self._calls[call]
            held.awaited.clear()
            self._failures[call] = message(0, decision)
            for old in sorted(self._failures)[:-_MAX_FAILURES]:
                del self._failures[old]
            ahead = [rank for rank in held.strayed if self._left_at.get(rank) == call - 1]
            self._left_at.update(dict.fromkeys(held.strayed, call))
            limit = held.begun + _AHEAD_SECONDS
            while any(self._came_to[rank] == call for rank in ahead):
                if (now := time.monotonic()) >= limit:
                    break
                self._changed.wait(limit - now)
            next_call = max((self._came_to[rank] + 1 for rank in ahead), default=0)
            if next_call <= self._next_call:
                return
            self._next_call = next_call
            self._numbers.skip_to(next_call)
            for link in held.links.values():
                self._send_to(link, sign(0.0, next_call=next_call))
            self._dismiss_early()

    def end_call(self, call: int, reason: str) -> None:
        """Forget a call, and tell the peers; ``reason`` matters to those who are still at it."""
        with self._changed:
            held = self._calls.pop(call, None)
            if held is None:
                return
            for link in held.links.values():
                self._send_to(link, end(reason))
                self._finish(link)
            held.links.clear()  # which lead back here: answers can be large, and wait for nobody

    def _finish(self, link: Link) -> None:
        link.end_sending()
        self._loop.look_at(link)

    def send(self, ranks: Iterable[int], call: int, number: int, payload: bytes) -> None:
        """Send a message of round ``number`` to those of the ranks that have come."""
        self.send_frame(ranks, call, message(number, payload))

    def send_frame(self, ranks: Iterable[int], call: int, frame: bytes) -> None:
        """Send what ``frames.message`` has made to those of the ranks that have come."""
        with self._changed:
            links = self._calls[call].links
            found = [links[rank] for rank in ranks if rank in links]
        for link in found:
            self._send_to(link, frame)

    def _send_to(self, link: Link, frame: bytes) -> None:
        with suppress(OSError):  # what it has sent before is still to be read, and then its end
            link.send(frame)
        if link.is_behind:
            self._loop.look_at(link)

    def beat(self) -> float | None:
        while self._abandoned:
            self.end_call(self._abandoned.popleft(), "it has given up")
        now = time.monotonic()
        with self._changed:
            due = [held for held in self._calls.values() if held.sign_at <= now]
            for held in due:
                held.sign_at = now + held.signs.seconds
            for link, limit in [*self._unplaced.values()]:
                if limit <= now:
                    self._decide(link)
            times = [held.sign_at for held in self._calls.values()]
            times += [limit for _, limit in self._unplaced.values()]
            pause = max(min(times) - now, 0.0) if times else None
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
        with self._changed:
            link.lost = link.lost or reason
            if link.part_of is not None:
                link.part_of.gone.setdefault(link.rank, reason)
                self._changed.notify_all()

    def take(self, link: Link) -> None:
        frames = link.read()
        with self._changed:
            for frame in frames:
                if link.part_of is not None:
                    self._keep(link.part_of, link.rank, *frame)
                elif frame.kind == END:  # it has given up waiting, so its answers do not count
                    link.early = [frame]
                    self._finish(link)
                elif frame.kind == MESSAGE:
                    link.early.append(frame)
            if any(frame.kind != SIGN for frame in frames):
                self._changed.notify_all()

    def _keep(self, held: Call, rank: int, kind: int, number: int, payload: bytes) -> None:
        held.heard[rank] = held.seen[rank] = time.monotonic()
        if kind == MESSAGE:
            held.rounds.setdefault(number, {}).setdefault(rank, payload)
            return
        if not self._members:
            self._numbers.skip_to(number)
        if kind == END:
            left = payload.decode(errors="replace")
            held.gone.setdefault(rank, Departure(left or "it has ended this save or load"))
        else:
            age, doing = read_sign(payload)
            held.heard[rank] -= age
            held.doing[rank] = doing

    def collect(
        self,
        call: int,
        number: int,
        ranks: Iterable[int],
        timeout: float,
        is_enough: Callable[[dict[int, bytes]], bool] = lambda _: False,
        since: float | None = None,
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """Wait for the messages of some ranks; return them, and who is lost with the reason.

        A rank is lost when its connection is, when it has left the call, or when for ``timeout``
        seconds in which this process was awake it has not come, has sent nothing, or its work has
        not got on. ``is_enough``, asked with what is new, may end the wait early; one that goes on
        with it says ``since`` when they have been waited for.
        """
        now = time.monotonic()
        waiting = Waiting(now if since is None else since, timeout)
        pending = set(ranks)
        answers: dict[int, bytes] = {}
        pause = min(timeout / 4, _LOOK_SECONDS)
        expected = now
        while True:
            with self._changed:
                now = time.monotonic()
                waiting.asleep += max(now - expected, 0.0)
                held = self._calls[call]
                arrived = held.rounds.pop(number, {})  # each is looked at once; there are thousands
                new = {rank: arrived[rank] for rank in arrived if rank in pending}
                answers |= new
                pending -= new.keys()
                lost, wake = lost_of(held, pending, waiting, now, now + pause)
                if self._failure:
                    lost = dict.fromkeys(pending, self._failure)
                if len(lost) == len(pending) or is_enough(new):
                    return answers, lost
                expected = max(wake, now)
                self._changed.wait(max(wake - now, 0.001))

    def arrived(self, call: int, number: int) -> dict[int, bytes]:
        """Return the messages of a round that are there already, by rank."""
        with self._changed:
            held = self._calls.get(call)
            return dict(held.rounds.get(number, {})) if held is not None else {}

    def gone(self, call: int) -> dict[int, str]:
        """Return who has left a call, or has been lost, and why."""
        with self._changed:
            held = self._calls.get(call)
            return dict(held.gone) if held is not None else {}

    def lost(self, call: int, ranks: Iterable[int], waiting: Waiting) -> dict[int, str]:
        """Return who of some ranks is lost by now, and why, without waiting for any of them."""
        now = time.monotonic()
        with self._changed:
            lost, _ = lost_of(self._calls[call], ranks, waiting, now, now)
            return dict.fromkeys(ranks, self._failure) if self._failure else lost

    def abandon(self, call: int) -> None:
        """Have a call ended soon; may be called by the garbage collector, at any point."""
        self._abandoned.append(call)
        self._loop.ring()

    def fail(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections."""
        self._loop.stop()

    def __del__(self) -> None:
        self.close()


def _remember(targets: dict[int, int], call: int, target: int, most: int) -> None:
    """Note what a call is made for, and forget the call with the lowest number."""
    targets[call] = target
    if len(targets) > most:
        del targets[min(targets)]


def _has_left(link: Link) -> bool:
    """Whether a member has given up its call, or is gone."""
    return bool(link.lost) or any(frame.kind == END for frame in link.early)
