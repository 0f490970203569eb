"""Requests to one agent, over connections that are kept for the next one.

An agent ends when nobody is connected for long: those kept connections are what tells it that this
process lives.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from dtckpt.errors import StorageError

from ..failures import already_exists, not_found
from .frames import Channel, Message
from .greeting import Greeted, greet
from .job import Job

_CONNECT_SECONDS = 3.0
_REST_SECONDS = 10.0
"""For so long an agent that could not be reached is not asked again."""
_MAX_IDLE = 8
"""Connections that are kept."""

Address = str | tuple[str, int]
"""Path of a socket of this host, or host and port."""


class Lost(StorageError):
    """An agent cannot be reached, has gone or makes no progress; what it held may be elsewhere."""


class Peer:
    """One agent, as this process sees it; any thread may use it."""

    def __init__(self, job: Job, addresses: tuple[Address, ...], host: str = "") -> None:
        self.job = job
        self.addresses = addresses
        self.host = host
        """As the agent calls it; what is known of it before it has been reached."""
        self._idle: list[Channel] = []
        self._lock = threading.RLock()  # a finalizer may come in between
        self._rests_until = 0.0
        self.refusal: StorageError | None = None
        """Why it could not be reached."""

    @property
    def is_own(self) -> bool:
        """Whether it is reached within this host."""
        return isinstance(self.addresses[0], str)

    @property
    def where(self) -> str:
        """The agent, for messages."""
        places = [a if isinstance(a, str) else f"{a[0]}:{a[1]}" for a in self.addresses]
        return f"{self.host or 'unknown host'} ({', '.join(places)})"

    def is_living(self) -> bool:
        """Whether it can be reached, going by what was known a few seconds ago.

        StorageError if somebody is there who is not an agent of the job, or of another version.
        """
        with self._lock:
            if self._idle:
                return True
        try:
            self.give_back(self._taken()[0])
        except Lost:
            return False
        return True

    def ask(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the answer, and the bytes with it.

        ``Lost`` where no agent answers; the errors of the library that the agent tells.
        """
        sent = self.begin(op, payload, **fields)
        return self.finish(sent, op, payload, **fields)

    def begin(self, op: str, payload: bytes = b"", **fields: Any) -> Channel:
        """Send a request, the answer to which ``finish`` returns; ``Lost`` if that fails."""
        while True:
            channel, is_fresh = self._taken()
            try:
                channel.send({"op": op, **fields}, payload)
            except OSError as error:
                channel.close()
                if is_fresh or isinstance(error, TimeoutError):
                    raise self.lost(error) from error
            else:
                return channel

    def finish(
        self, channel: Channel, op: str, payload: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request.

        Where the agent has ended since the connection was made its successor is asked: whatever the
        one before did, it has taken with it.
        """
        try:
            message = channel.receive()
            data = channel.take(message.payload_bytes) if message.payload_bytes else b""
        except TimeoutError as error:
            channel.close()
            raise self.lost(error) from error
        except OSError:
            channel.close()
            self._forget_idle()
            channel = self._connected()
            try:
                channel.send({"op": op, **fields}, payload)
                message = channel.receive()
                data = channel.take(message.payload_bytes) if message.payload_bytes else b""
            except OSError as error:
                channel.close()
                raise self.lost(error) from error
        self.give_back(channel)
        return self.checked(message).fields, data

    def take(self) -> Channel:
        """Return a connection that answers, for requests that are more than one message.

        ``Lost`` where there is none. It goes back by ``give_back``, or is closed.
        """
        channel, is_fresh = self._taken()
        if not is_fresh:
            try:
                channel.send({"op": "status"})
                channel.receive()
            except OSError:
                channel.close()
                self._forget_idle()
                channel = self._connected()
        return channel

    def give_back(self, channel: Channel) -> None:
        """Keep a connection on which nothing is under way for the next request."""
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(channel)
                return
        channel.close()

    @contextmanager
    def channel(self) -> Generator[Channel]:
        """Lend a connection that answers; it is kept for others if the block ends well."""
        channel = self.take()
        try:
            yield channel
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise self.lost(error) from error
            raise
        self.give_back(channel)

    def checked(self, message: Message) -> Message:
        """Return a message unless it tells of an error, which is raised."""
        kind = message.fields.get("error")
        if kind is None:
            return message
        why = str(message.fields.get("why"))
        if kind == "missing":
            raise not_found(self.where, f": {why}")
        if kind == "exists":
            raise already_exists(f"{self.where}: {why}")
        raise StorageError(f"the agent of {self.where}: {why}")

    def lost(self, cause: Exception) -> Lost:
        """Return the error for an agent that is not there or does not answer, and let it rest."""
        why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        if isinstance(cause, TimeoutError):
            why = f"it made no progress for {self.job.seconds:g} s"
        error = Lost(f"the agent of {self.where} does not answer: {why}")
        self._forget_idle()
        self.refusal = error
        # That of this host is started anew where it is missing.
        self._rests_until = 0.0 if self.is_own else time.monotonic() + _REST_SECONDS
        return error

    def _taken(self) -> tuple[Channel, bool]:
        """Return a connection, and whether it is a fresh one."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._connected(), True

    def _connected(self) -> Channel:
        if time.monotonic() < self._rests_until and self.refusal is not None:
            raise self.refusal
        cause: Exception = ConnectionError("it has no address")
        for address in self.addresses:
            try:
                channel, greeted = self._greeted(address)
            except StorageError as error:
                self.refusal = error
                raise
            except OSError as error:
                cause = error
            else:
                self.host = greeted.host
                self.refusal = None
                return channel
        raise self.lost(cause) from cause

    def _greeted(self, address: Address) -> tuple[Channel, Greeted]:
        seconds = min(_CONNECT_SECONDS, self.job.seconds)
        if isinstance(address, str):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            connection = socket.create_connection(address, seconds)
        channel = Channel(connection, seconds)
        try:
            if isinstance(address, str):
                connection.connect(address)
            greeted = greet(channel, self.job.name, self.job.token, self.where)
        except BaseException:
            channel.close()
            raise
        channel.seconds = self.job.seconds
        connection.settimeout(self.job.seconds)
        return channel, greeted

    def _forget_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()
