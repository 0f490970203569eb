"""Messages between the coordinator of a group and its members, with deadlines.

Every member holds one connection to the coordinator. A rank that dies closes its connection, so it
is missed at once; one that falls silent is missed after a deadline; and nothing here touches the
process group, so a save may go on in the background while the training uses the group.

Frames are tagged with a job, one save or load, and a round within it. The coordinator numbers the
jobs and says when one begins and ends, so a rank that missed one is in step again with the next.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import zstandard

_HEAD = struct.Struct("!BQIQ")  # kind, job, round, length
_MESSAGE, _PACKED, _ALIVE, _BEGIN, _END = range(5)
_PACK_BYTES = 1 << 16
"""Longer messages, which list tensors, are compressed; they shrink ten times and more."""
_SEND_SECONDS = 120.0
"""A peer that takes nothing for so long counts as gone, and so does the connection."""
_LOOK_SECONDS = 0.5
"""How often a wait looks around, though nothing has arrived."""
PULSE_SECONDS = 5.0
"""Signs of life come at least so often."""

Answers = dict[int, bytes]


@dataclass(slots=True)
class _Job:
    """What has been heard of one save or load."""

    rounds: dict[int, Answers] = field(default_factory=dict[int, Answers])
    heard: dict[int, float] = field(default_factory=dict[int, float])
    left: dict[int, str] = field(default_factory=dict[int, str])
    """Who has ended the job for itself, and why."""
    pulse: Callable[[], bool] | None = None
    """Whether this rank, at work on the job, should show a sign of life now."""
    pulse_seconds: float = 0.0
    """How often to ask."""


class Wire:
    """The connections of one rank: the coordinator's to all members, a member's to it alone."""

    def __init__(self, peers: Mapping[int, socket.socket], *, leads: bool) -> None:
        self._sockets = dict(peers)
        self._leads = leads
        self._sending = {rank: threading.Lock() for rank in peers}
        self._gone: dict[int, str] = {}
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self._begun: deque[tuple[int, str]] = deque()
        """Jobs that the coordinator has begun and this member has not joined yet."""
        self._changed = threading.Condition()
        for connection in peers.values():
            connection.settimeout(_SEND_SECONDS)
        wake, self._waker = socket.socketpair()
        _wires.add(self)
        reader = threading.Thread(
            target=_read_all,
            args=(weakref.ref(self), dict(peers), wake),
            name="dtckpt-wire",
            daemon=True,
        )
        reader.start()

    def begin_job(self, purpose: str) -> int:
        """Begin a job as the coordinator and return its number."""
        with self._changed:
            job = self._next_job
            self._next_job += 1
            self._jobs[job] = _Job()
        self._send_all(self._sockets, _BEGIN, job, 0, _encoded(purpose))
        return job

    def join_job(self, timeout: float) -> tuple[int, str] | None:
        """Return number and purpose of the next job of the coordinator; None if none begins."""
        limit = time.monotonic() + timeout
        with self._changed:
            while not self._begun:
                left = limit - time.monotonic()
                if left <= 0 or self._gone:
                    return None
                self._changed.wait(left)
            job, purpose = self._begun.popleft()
            self._jobs.setdefault(job, _Job())
            return job, purpose

    def end_job(self, job: int, reason: str) -> None:
        """Forget a job, and tell the peers; ``reason`` matters to those who are still at it."""
        with self._changed:
            if self._jobs.pop(job, None) is None:
                return
        self._send_all(self._sockets, _END, job, 0, _encoded(reason))

    def send(self, ranks: Iterable[int], job: int, number: int, payload: bytes) -> None:
        """Send a message of round ``number``; a peer that cannot take it counts as gone."""
        kind = _MESSAGE
        if len(payload) > _PACK_BYTES:
            kind, payload = _PACKED, zstandard.compress(payload, 1)
        self._send_all(ranks, kind, job, number, payload)

    def tell_alive(self, job: int) -> None:
        """Let all peers know that this rank is still at work on a job."""
        self._send_all(self._sockets, _ALIVE, job, 0, b"")

    def set_pulse(self, job: int, seconds: float, pulse: Callable[[], bool] | None) -> None:
        """Show a sign of life every few seconds, as long as ``pulse`` says so."""
        with self._changed:
            if job in self._jobs:
                self._jobs[job].pulse, self._jobs[job].pulse_seconds = pulse, seconds
        if pulse is not None:
            with suppress(OSError):
                self._waker.send(b"!")

    def beat(self) -> None:
        """Show the signs of life that are due; called by the reading thread."""
        with self._changed:
            due = [job for job, held in self._jobs.items() if held.pulse and held.pulse()]
        for job in due:
            self.tell_alive(job)

    def pause(self) -> float | None:
        """Return the seconds until the next beat; None while no job wants any."""
        with self._changed:
            return min(
                (held.pulse_seconds for held in self._jobs.values() if held.pulse), default=None
            )

    def _send_all(
        self, ranks: Iterable[int], kind: int, job: int, number: int, payload: bytes
    ) -> None:
        frame = _HEAD.pack(kind, job, number, len(payload)) + payload
        for rank in ranks:
            if rank in self._gone:
                continue
            try:
                with self._sending[rank]:
                    self._sockets[rank].sendall(frame)
            except OSError as error:
                self.lose(rank, f"sending to it failed: {error}")
                with suppress(OSError):  # half a frame may be under way; nothing can follow it
                    self._sockets[rank].shutdown(socket.SHUT_RDWR)

    def lose(self, rank: int, reason: str) -> None:
        """Note that nothing more can come from a peer."""
        with self._changed:
            self._gone.setdefault(rank, reason)
            self._changed.notify_all()

    def receive(self, rank: int, kind: int, job: int, number: int, payload: bytes) -> None:
        """Keep a frame for the job that waits for it, or will."""
        if kind == _PACKED:
            payload = zstandard.decompress(payload)
        with self._changed:
            if kind == _BEGIN:
                self._begun.append((job, payload.decode()))
                self._jobs[job] = _Job()
            elif kind == _END and not self._leads:
                self._begun = deque(begun for begun in self._begun if begun[0] != job)
            held = self._jobs.get(job)
            if held is None:  # over
                return
            held.heard[rank] = time.monotonic()
            if kind == _END:
                held.left[rank] = payload.decode()
            elif kind in (_MESSAGE, _PACKED):
                held.rounds.setdefault(number, {})[rank] = payload
            if kind != _ALIVE:
                self._changed.notify_all()

    def collect(
        self,
        job: int,
        number: int,
        ranks: Iterable[int],
        timeout: float,
        is_enough: Callable[[Answers], bool] = lambda _: False,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> tuple[Answers, dict[int, str]]:
        """Wait for the messages of some ranks; return them, and who is lost with the reason.

        A rank is lost when its connection is, when it has left the job, or when it has sent nothing
        for ``timeout`` seconds in which this process was awake. ``is_enough``, asked with what is
        new, may end the wait early. ``keep_alive`` is called now and then.
        """
        start = time.monotonic()
        pending = set(ranks)
        answers: Answers = {}
        pulse = min(timeout / 4, PULSE_SECONDS)
        pause, pulse_at = min(pulse, _LOOK_SECONDS), start + pulse
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
                lost, wake = self._lost(held, pending, start, timeout + asleep, now, now + pause)
                if len(lost) == len(pending) or is_enough(new):
                    held.rounds.pop(number, None)
                    return answers, lost
                for rank in new:
                    del held.rounds[number][rank]
                expected = max(wake, now)
                self._changed.wait(max(wake - now, 0.001))
            if time.monotonic() >= pulse_at:
                pulse_at = time.monotonic() + pulse
                keep_alive()

    def _lost(
        self,
        held: _Job,
        pending: Iterable[int],
        start: float,
        timeout: float,
        now: float,
        wake: float,
    ) -> tuple[dict[int, str], float]:
        """Return who is lost, and when to look again."""
        lost: dict[int, str] = {}
        if not self._gone and not held.left and now < start + timeout:
            return lost, min(wake, start + timeout)  # nobody can be; there may be thousands
        for rank in pending:
            limit = max(start, held.heard.get(rank, start)) + timeout
            if rank in held.left:
                lost[rank] = held.left[rank] or "it has ended this save or load"
            elif rank in self._gone:
                lost[rank] = self._gone[rank]
            elif now >= limit:
                lost[rank] = f"it showed no sign of life within {timeout:g} s"
            else:
                wake = min(wake, limit)
        return lost, wake

    def arrived(self, job: int, number: int) -> list[bytes]:
        """Return the messages of a round that are there already."""
        with self._changed:
            held = self._jobs.get(job)
            return list(held.rounds.get(number, {}).values()) if held is not None else []

    def has_heard(self, job: int, rank: int) -> bool:
        """Whether a peer has shown that it is at a job."""
        with self._changed:
            return job in self._jobs and rank in self._jobs[job].heard

    def abandon(self) -> None:
        """Let go of the connections without ending them for the process that shares them."""
        for connection in (*self._sockets.values(), self._waker):
            connection.close()

    def close(self) -> None:
        """End all connections; the reading thread closes them."""
        for connection in self._sockets.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._waker.close()

    def __del__(self) -> None:
        self.close()


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # file names need not be Unicode


class _Reader:
    """Cuts the bytes of one connection into frames."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.data = bytearray()

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Take what has arrived; ConnectionError at the end of the connection."""
        received = self.connection.recv(1 << 20)
        if not received:
            raise ConnectionError("it closed its connection: its process ended or left")
        self.data += received
        found: list[tuple[int, int, int, bytes]] = []
        while len(self.data) >= _HEAD.size:
            kind, job, number, length = _HEAD.unpack_from(self.data)
            end = _HEAD.size + length
            if len(self.data) < end:
                break
            found.append((kind, job, number, bytes(self.data[_HEAD.size : end])))
            del self.data[:end]
        return found


def _read_all(
    owner: weakref.ref[Wire], peers: dict[int, socket.socket], wake: socket.socket
) -> None:
    """Read until nobody holds the wire any more, and beat for this rank while it works."""
    try:
        with selectors.DefaultSelector() as selector, wake:
            selector.register(wake, selectors.EVENT_READ, None)
            for rank, connection in peers.items():
                selector.register(connection, selectors.EVENT_READ, _Reader(rank, connection))
            pause: float | None = None
            while True:
                ready = selector.select(pause)
                wire = owner()
                if wire is None:
                    return
                for key, _ in ready:
                    if key.fileobj is not wake:
                        _take(selector, key, wire)
                    elif not wake.recv(4096):
                        return
                wire.beat()
                pause = wire.pause()
                del wire
    finally:
        for connection in peers.values():
            connection.close()


def _take(selector: selectors.BaseSelector, key: selectors.SelectorKey, wire: Wire) -> None:
    """Take what a connection has brought."""
    reader: _Reader = key.data
    try:
        for frame in reader.frames():
            wire.receive(reader.rank, *frame)
    except Exception as error:
        # Whatever it is, nothing that follows on this connection can be understood.
        selector.unregister(key.fileobj)
        wire.lose(reader.rank, str(error) or type(error).__name__)


_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked data loader must not keep the connections of a dead trainer open.
    for wire in list(_wires):
        wire.abandon()
    _wires.clear()


os.register_at_fork(after_in_child=_close_in_child)
