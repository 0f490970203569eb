"""How a long decision comes to very many ranks: those who have it hand it on to a few others.

The coordinator sends it to its first members, and tells all others who hands it on to them: the
ranks are a tree by their places in the group. Whoever does not get it there asks the coordinator,
so nothing depends on any one of those who hand on. It is not for short decisions, which are as soon
sent as offered, nor for failures, after which ranks do not wait for each other.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from dtckpt.addresses import listen_beside
from dtckpt.errors import CheckpointError

from .frames import MESSAGE
from .greeting import Hello, Invitation, Listener, say_hello
from .link import Link
from .loop import Loop, Owner

FAN_OUT = 16
"""To so many each rank hands on."""
LONG_BYTES = 4 << 10
"""What is no longer is sent to all by the coordinator."""
MOST_BYTES = 8 << 20
"""So is what the coordinator sends no more than this of in all."""
_CONNECT_SECONDS = 5.0
_MAX_CALLS = 16
_LOOK_SECONDS = 0.25


def is_relayed(num_bytes: int, num_ranks: int) -> bool:
    """Whether a message of so many bytes is handed on between so many members."""
    return num_bytes > LONG_BYTES and num_bytes * num_ranks > MOST_BYTES and num_ranks > FAN_OUT


def parent_of(position: int) -> int:
    """Return the place in the group of who hands on to a member."""
    return (position - 1) // FAN_OUT


def children_of(position: int, size: int) -> range:
    """Return the places of those to whom a rank hands on, in a group of so many."""
    first = position * FAN_OUT + 1
    return range(min(first, size), min(first + FAN_OUT, size))


class Relay(Owner):
    """What a member hands on; it listens for those who come for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        self._invitation: Invitation | None = None
        self._frames: dict[int, dict[str, bytes]] = {}
        """By the calls under way and the round."""
        self._waiting: dict[int, dict[str, list[Link]]] = {}

    def begin(self, call: int, host: str) -> Invitation | None:
        """Begin a call; return how others reach this rank, None if they cannot.

        The generation of the invitation is the number that this rank gives to the call: who comes
        says this one, since its own may differ.

        ``host`` is the address of this host at which the other ranks reach it.
        """
        with self._lock:
            self._frames[call], self._waiting[call] = {}, {}
            for old in [number for number in self._frames if number <= call - _MAX_CALLS]:
                del self._frames[old], self._waiting[old]  # it was interrupted, and has not ended
            if self._loop is None:
                with suppress(OSError, CheckpointError):  # then they ask the coordinator
                    listener = Listener([listen_beside(host)])
                    self._invitation = listener.invitation([host], 0)
                    self._loop = Loop(listener)
                    self._loop.start(self)
            return self._invitation and replace(self._invitation, generation=call)

    def hand_on(self, call: int, number: int, frame: bytes) -> None:
        """Give the decision of a round to those who wait for it, and to those who come yet."""
        with self._lock:
            self._frames.get(call, {})[str(number)] = frame
            links = self._waiting.get(call, {}).pop(str(number), [])
        for link in links:
            self._give(link, frame)

    def end(self, call: int) -> None:
        """Forget a call; who still waits has to ask the coordinator."""
        with self._lock:
            self._frames.pop(call, None)
            links = [link for held in self._waiting.pop(call, {}).values() for link in held]
        for link in links:
            self._give(link, b"")

    def _give(self, link: Link, frame: bytes) -> None:
        with suppress(OSError):  # it has gone
            link.send(frame)
        link.end_sending()
        if self._loop is not None:
            self._loop.look_at(link)

    def is_known(self, hello: Hello) -> bool:
        return True

    def meet(self, hello: Hello, connection: socket.socket) -> None:
        link = Link(hello.rank, connection)
        with self._lock:
            frame = self._frames.get(hello.call, {}).get(hello.purpose)
            if frame is None and hello.call in self._waiting:
                self._waiting[hello.call].setdefault(hello.purpose, []).append(link)
                if self._loop is not None:
                    self._loop.look_at(link)
                return
        self._give(link, frame or b"")

    def take(self, link: Link) -> None:
        link.read()  # nothing but the end

    def lose(self, link: Link, reason: str) -> None:
        pass

    def beat(self) -> float | None:
        return None

    def fail(self, reason: str) -> None:
        pass

    def close(self) -> None:
        """Listen no more."""
        if self._loop is not None:
            self._loop.stop()

    def __del__(self) -> None:
        self.close()


def fetch(
    invitation: Invitation,
    hello: Hello,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> bytes:
    """Return what a member hands on, for the call and the round that ``hello`` names.

    Raises OSError where it does not: at once if it is gone, or if for so many seconds nothing
    comes. Meanwhile ``check`` is called now and then.
    """
    if not invitation.addresses:
        raise ConnectionError("it does not listen")
    connection = say_hello(
        invitation.addresses[0], invitation, hello, min(_CONNECT_SECONDS, seconds)
    )
    link = Link(hello.rank, connection, welcome=bytes.fromhex(invitation.welcome))
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        while (left := link.moved_at + seconds - time.monotonic()) > 0:
            check()
            if poll.poll(1000 * min(left, _LOOK_SECONDS)):
                for frame in link.read():
                    if frame.kind == MESSAGE and str(frame.number) == hello.purpose:
                        return frame.payload
    finally:
        link.close()
    raise TimeoutError(f"it has sent nothing for {seconds:g} s")


def hello_of(rank: int, call: int, number: int) -> Hello:
    """Return how a member says what it comes for."""
    return Hello(rank=rank, instance=secrets.randbits(64), purpose=str(number), call=call)
