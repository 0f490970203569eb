"""Wires, and connections of theirs whose other end is a socket in the hand of a test."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dtckpt.checkpoint.ranks import wire as wire_module
from dtckpt.checkpoint.ranks.call import CallNumbers, Signs
from dtckpt.checkpoint.ranks.frames import Frame, FrameReader
from dtckpt.checkpoint.ranks.greeting import Hello
from dtckpt.checkpoint.ranks.link import Link
from dtckpt.checkpoint.ranks.wire import Wire

QUIET = Signs(3600.0, lambda: None)
"""No signs of life."""
SECONDS = 20.0
"""More than anything here takes, but for what never comes."""


class End:
    """The other end of a connection."""

    def __init__(self, other: socket.socket) -> None:
        self.socket = other
        self._reader = FrameReader()
        other.settimeout(SECONDS)

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def some(self) -> list[Frame]:
        """Return the next frames; none if nothing more will come."""
        while data := self.socket.recv(1 << 16):
            if found := self._reader.frames(data):
                return found
        return []

    def all(self, *but: int) -> list[Frame]:
        """Return what comes until the end, without some kinds of frames."""
        found: list[Frame] = []
        while frames := self.some():
            found += frames
        return [frame for frame in found if frame.kind not in but]

    def is_silent(self) -> bool:
        """Whether nothing has come, not even the end."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def wait_for_close(self) -> None:
        """Wait until the connection is closed, not only told to be at its end."""
        poll = select.poll()
        poll.register(self.socket, 0)
        assert poll.poll(SECONDS * 1000)


class Ends:
    """Makes wires and connections, and closes them."""

    def __init__(self) -> None:
        self._made: list[Wire | socket.socket] = []

    def wire(self, *members: int, numbers: CallNumbers | None = None) -> Wire:
        """Return the wire of a member, or of the coordinator of some."""
        made = Wire(members, numbers=numbers)
        self._made.append(made)
        return made

    def pair(self) -> tuple[socket.socket, End]:
        """Return a connection and its other end."""
        one, other = socket.socketpair()
        self._made += [one, other]
        return one, End(other)

    def come(
        self,
        wire: Wire,
        rank: int,
        call: int,
        *frames: bytes,
        purpose: str = "save",
        target: int = 0,
    ) -> End:
        """Have a member come to a call, with what it sends at once."""
        one, member = self.pair()
        member.send(*frames)
        wire.meet(Hello(rank=rank, purpose=purpose, call=call, target=target), one)
        return member

    def join(self, signs: Signs = QUIET, numbers: CallNumbers | None = None) -> tuple[Wire, End]:
        """Return the wire of a member that is at call 0, and the coordinator's end of it."""
        one, coordinator = self.pair()
        wire = self.wire(numbers=numbers)
        wire.join_call(0, "save", signs, Link(0, one))
        return wire, coordinator

    def close(self) -> None:
        for made in self._made:
            made.close()


class Clock:
    """The clock of the wires, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(wire_module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def moves_in(self, wire: Wire, look: Callable[[], object] = lambda: None) -> list[float]:
        """Have it move on when a wire waits, and something done then; return all waits."""
        waits: list[float] = []

        def wait(seconds: float) -> None:
            assert len(waits) < 1000
            waits.append(seconds)
            self.now += seconds
            look()

        self._monkeypatch.setattr(vars(wire)["_changed"], "wait", wait)
        return waits


def keep(wire: Wire, rank: int, frame: bytes) -> None:
    """Hand a frame to call 0 as if it had just arrived."""
    [read] = FrameReader().frames(frame)
    wire._keep(vars(wire)["_calls"][0], rank, *read)  # pyright: ignore[reportPrivateUsage]


def on_wait(wire: Wire, monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Do something once the wire waits; each wait has to be ended by somebody."""
    monkeypatch.setattr(wire_module, "_LOOK_SECONDS", 3600.0)
    changed = vars(wire)["_changed"]
    wait, thread = changed.wait, threading.Thread(target=action)

    def act_and_wait(_: float) -> None:
        if not thread.ident:
            thread.start()  # the lock is held until the wait has begun
        assert wait(SECONDS), "nobody told of it"

    monkeypatch.setattr(changed, "wait", act_and_wait)
