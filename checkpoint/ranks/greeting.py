"""How a member makes itself known to the coordinator, and strangers do not.

The coordinator listens for the life of the group, since every save and load connects anew. Who
connects says hello with a token that only the ranks of the group know; until then it is a stranger,
of whom nothing but these few bytes is read. Strangers are greeted beside each other, each has a few
seconds, and there are never more than a number of them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

PURPOSE_BYTES = 48
"""As long as the name of a purpose may be."""
_MAGIC = b"dtckpt-4"
# magic, token, rank, instance, purpose, call, target
_HELLO = struct.Struct(f"!8s16sQQ{PURPOSE_BYTES}sQQ")
_PROBE = "?"
_SECRET_BYTES = 16
_GREETING_SECONDS = 5.0
"""How long somebody who has connected may take to say hello."""
_MAX_STRANGERS = 256
"""How many may be about to say hello besides the ranks; else who has taken longest has to go."""
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Within a call somebody may wait for minutes until the others come; this keeps routers awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a member says first."""

    rank: int
    instance: int = 0
    """What tells it from the same rank in another group of this name, or another process."""
    purpose: str
    """What it calls."""
    call: int = 0
    """The number of the call."""
    target: int = 0
    """What it calls for, by `call.target_number`."""

    @property
    def is_probe(self) -> bool:
        """Whether it only asks who is there."""
        return self.purpose == _PROBE


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What members have to know to reach the coordinator, and to know it when they have."""

    addresses: tuple[tuple[str, int], ...] = ()
    token: str = ""
    welcome: str = ""
    """What the coordinator answers: who answers otherwise is somebody else."""
    size: int = 0
    """How many ranks the group has."""
    generation: int = 0
    """How often this rank has introduced itself to the ranks of a group of this name and size."""
    problem: str = ""
    """Why the coordinator cannot be reached at all."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Invitation:
        value: dict[str, Any] = json.loads(data)
        addresses = tuple((host, port) for host, port in value.pop("addresses"))
        return cls(addresses=addresses, **value)


class Greeting:
    """Somebody who has connected and not said yet who it is."""

    def __init__(self, connection: socket.socket, token: bytes, welcome: bytes) -> None:
        self.connection = connection
        self.limit = time.monotonic() + _GREETING_SECONDS
        self._token = token
        self._welcome = welcome
        self._data = b""

    def read(self) -> Hello | None:
        """Return the hello once it is complete; OSError from a stranger."""
        try:
            part = self.connection.recv(_HELLO.size - len(self._data))
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionError("it left without a word")
        self._data += part
        if len(self._data) < _HELLO.size:
            return None
        magic, token, rank, instance, purpose, call, target = _HELLO.unpack(self._data)
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            raise ConnectionError("a stranger")
        name = purpose.rstrip(b"\0").decode(errors="replace")
        return Hello(rank=rank, instance=instance, purpose=name, call=call, target=target)

    def welcome(self) -> None:
        """Answer a hello; OSError if nobody is there any more."""
        self.connection.send(self._welcome)


class Listener:
    """Where the coordinator is reached; its ``sockets`` are served by the loop."""

    def __init__(self, sockets: list[socket.socket], num_ranks: int = 0) -> None:
        """``num_ranks`` may come at the same time; none of them has to make way for another."""
        self.sockets = sockets
        self._num_ranks = num_ranks
        self._most = _MAX_STRANGERS + num_ranks
        for listening in sockets:
            listening.setblocking(False)
        self._token = secrets.token_bytes(_SECRET_BYTES)
        self._welcome = secrets.token_bytes(_SECRET_BYTES)
        self._greetings: dict[socket.socket, Greeting] = {}

    def invitation(self, hosts: list[str], generation: int) -> Invitation:
        """Return what members need; ``hosts`` are the names of the sockets for others."""
        return Invitation(
            addresses=tuple(
                (host, listening.getsockname()[1])
                for host, listening in zip(hosts, self.sockets, strict=True)
            ),
            token=self._token.hex(),
            welcome=self._welcome.hex(),
            size=self._num_ranks,
            generation=generation,
        )

    def accept(
        self, listening: socket.socket, forget: Callable[[Greeting], None]
    ) -> Greeting | None:
        """Take whoever has connected; ``forget`` is called with one who has to make way."""
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return None
        except OSError:  # out of descriptors, for instance
            if self._greetings:
                forget(next(iter(self._greetings.values())))
            time.sleep(0.01)  # not to spin on those who wait
            return None
        try:
            prepare(connection)
        except OSError:  # it has gone already
            connection.close()
            return None
        connection.setblocking(False)
        if len(self._greetings) >= self._most:
            forget(next(iter(self._greetings.values())))
        greeting = self._greetings[connection] = Greeting(connection, self._token, self._welcome)
        return greeting

    def greeting_of(self, connection: socket.socket) -> Greeting | None:
        """Return who has connected there; None for one who had to make way just now."""
        return self._greetings.get(connection)

    def forget(self, greeting: Greeting) -> None:
        """Note that somebody has said hello or is gone."""
        self._greetings.pop(greeting.connection, None)

    def overdue(self) -> list[Greeting]:
        """Return those who have taken too long."""
        now = time.monotonic()
        return [greeting for greeting in self._greetings.values() if greeting.limit <= now]

    def pause(self) -> float | None:
        """Return the seconds until the next one takes too long; None where nobody is there."""
        first = next(iter(self._greetings.values()), None)
        return None if first is None else max(first.limit - time.monotonic(), 0.0)

    def close(self) -> None:
        """Close the sockets, and those of all who have not said hello."""
        for held in (*self.sockets, *self._greetings):
            held.close()


def prepare(connection: socket.socket) -> None:
    """Set what every connection between ranks has."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with suppress(AttributeError, OSError):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def say_hello(
    address: tuple[str, int], invitation: Invitation, hello: Hello, seconds: float
) -> socket.socket:
    """Connect to the coordinator and say who calls; OSError where that cannot be done.

    It answers with its welcome, which the caller still has to read.
    """
    connection = socket.create_connection(address, max(seconds, 0.001))
    try:
        prepare(connection)
        purpose, token = hello.purpose.encode(), bytes.fromhex(invitation.token)
        said = (hello.rank, hello.instance, purpose, hello.call, hello.target)
        connection.sendall(_HELLO.pack(_MAGIC, token, *said))
    except BaseException:
        connection.close()
        raise
    return connection


def probe(
    address: tuple[str, int], invitation: Invitation, rank: int, instance: int, seconds: float
) -> None:
    """Find out whether the coordinator is at an address, and knows us; OSError if it does not.

    A connection that is given up for its silence does not count as taking part in a call.
    """
    limit = time.monotonic() + seconds
    expected, data = bytes.fromhex(invitation.welcome), b""
    hello = Hello(rank=rank, instance=instance, purpose=_PROBE)
    with say_hello(address, invitation, hello, seconds) as connection:
        while len(data) < len(expected):
            connection.settimeout(max(limit - time.monotonic(), 0.001))
            part = connection.recv(len(expected) - len(data))
            if not part:
                raise ConnectionError(
                    "the connection was closed during the greeting; who listens there may be of "
                    "another group of this name, or know this rank as another process"
                )
            data += part
    if not hmac.compare_digest(data, expected):
        raise ConnectionError("somebody else listens there")
