"""Messages between an agent and those who talk to it: a JSON object, then bytes.

Nothing that arrives is believed: lengths are compared before memory is taken, and nothing is
unpickled. Over a socket of the same host an open file can go along with a message.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_HEAD = struct.Struct("!IQ")
"""Bytes of the JSON text, and of what follows it."""
MAX_JSON_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
"""Sent at once: the time without progress is counted for each piece."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that has gone is noticed after half a minute, though nobody asks it for anything."""


@dataclass(slots=True)
class Message:
    """What has arrived, but for ``payload_bytes`` that the receiver still has to take."""

    fields: dict[str, Any]
    payload_bytes: int = 0
    fd: int | None = None
    """A descriptor that came along; it belongs to the receiver."""


class Channel:
    """A connection that carries messages; used by one thread at a time.

    Whatever makes no progress for ``seconds`` raises TimeoutError; an end of the other side
    ConnectionError. After an error nothing but ``close`` makes sense.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.socket = connection
        self.seconds = seconds
        connection.settimeout(seconds)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                with suppress(AttributeError, OSError):  # not on every system
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def is_on_host(self) -> bool:
        """Whether the other end is on this host and open files can be handed over."""
        return self.socket.family == socket.AF_UNIX

    def send(
        self,
        fields: dict[str, Any],
        payload: bytes | memoryview = b"",
        *,
        follows: int = 0,
        fd: int | None = None,
    ) -> None:
        """Send a message; ``follows`` is how many bytes the caller sends after it by itself."""
        text = json.dumps(fields).encode()
        head = _HEAD.pack(len(text), len(payload) + follows) + text
        if fd is not None:
            sent = socket.send_fds(self.socket, [head], [fd])
            head = head[sent:]
        self.send_bytes(memoryview(head))
        self.send_bytes(memoryview(payload))

    def send_bytes(self, view: memoryview) -> None:
        """Send bytes."""
        for start in range(0, len(view), _PIECE_BYTES):
            self.socket.sendall(view[start : start + _PIECE_BYTES])

    def send_file(self, fd: int, start: int, stop: int) -> None:
        """Send bytes of an open file; the system copies them straight out of it."""
        while start < stop:
            try:
                start += os.sendfile(self.socket.fileno(), fd, start, stop - start)
            except BlockingIOError:
                if not self._wait(select.POLLOUT, self.seconds):
                    raise TimeoutError("timed out") from None

    def receive(
        self, *, max_json_bytes: int = MAX_JSON_BYTES, wants_fd: bool = False, waits: bool = False
    ) -> Message:
        """Return the next message; with ``waits`` for as long as it takes to begin."""
        fds: list[int] = []
        if waits:
            self._wait(select.POLLIN, None)
        try:
            if wants_fd:
                data, fds, _, _ = socket.recv_fds(self.socket, _HEAD.size, 1)
            else:
                data = self.socket.recv(_HEAD.size)
            _expect(data)
            head = data + self.take(_HEAD.size - len(data))
            size, payload_bytes = _HEAD.unpack(head)
            fields = _parsed(self.take(_allowed(size, max_json_bytes)))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return Message(fields, payload_bytes, fds[0] if fds else None)

    def _wait(self, event: int, seconds: float | None) -> bool:
        """Wait until the connection can be read or written; whether that has come in time."""
        waiting = select.poll()  # select itself knows no descriptor above 1023
        waiting.register(self.socket, event)
        return bool(waiting.poll(None if seconds is None else seconds * 1000))

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        data = bytearray(size)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, view: memoryview) -> None:
        """Receive the next bytes into a buffer."""
        while view:
            received = self.socket.recv_into(view)
            _expect(received)
            view = view[received:]

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def __del__(self) -> None:
        self.close()


def _expect(received: object) -> None:
    if not received:
        raise ConnectionError("the connection was closed by the other side")


def _allowed(size: int, at_most: int) -> int:
    if size > at_most:
        raise ConnectionError(f"a message of {size} bytes, at most {at_most} are allowed")
    return size


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConnectionError("what arrived is not a message of an agent")
    return found
