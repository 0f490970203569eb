"""One connection of an agent, from its greeting to its end, in a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dtckpt.errors import CheckpointError, ObjectExists, ObjectNotFound

from ..frames import Channel, Message
from .holdings import Draft, Held, Holdings

_BUFFER_BYTES = 256 << 10
"""What arrives passes through so much memory, which a processor's cache holds."""

Fields = dict[str, Any]


@dataclass(slots=True)
class Session:
    """Answers the requests of one client. What it was writing when it goes away goes with it."""

    channel: Channel
    holdings: Holdings
    status: Callable[[], Fields]
    """What the agent tells of itself."""
    stop: Callable[[], None]
    """Ends the agent."""
    draft: Draft | None = field(default=None, init=False)

    def run(self) -> None:
        """Answer until the client ends the connection, which raises ConnectionError."""
        try:
            while True:
                self.answer(self.channel.receive(waits=True))
        finally:
            self.end_draft()

    def answer(self, message: Message) -> None:
        """Answer one request."""
        fields = message.fields
        request = _REQUESTS.get(str(fields.get("op")))
        try:
            if request is None:
                raise ConnectionError(f"an unknown request: {fields.get('op')!r}")
            payload = self._payload(message)
            request(self, fields, payload)
        except CheckpointError as error:
            self.channel.send({"error": _kind_of(error), "why": str(error)})
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionError(f"a request that makes no sense: {error!r}") from error

    def _payload(self, message: Message) -> bytes:
        """Return the bytes that came with a message, if the agent has room for them at all."""
        if message.payload_bytes > self.holdings.budget_bytes:
            raise ConnectionError(f"{message.payload_bytes} bytes are more than fit here")
        return self.channel.take(message.payload_bytes) if message.payload_bytes else b""

    def end_draft(self) -> None:
        """Give up what was being written."""
        if self.draft is not None:
            self.holdings.discard(self.draft)
            self.draft = None

    def tell_status(self, _fields: Fields, _payload: bytes) -> None:
        self.channel.send(self.status())

    def look(self, fields: Fields, _payload: bytes) -> None:
        self.channel.send({"objects": _told(self.holdings.look(fields["directory"]))})

    def list(self, fields: Fields, _payload: bytes) -> None:
        self.channel.send({"objects": _told(self.holdings.list(fields["prefix"]))})

    def open(self, fields: Fields, _payload: bytes) -> None:
        """Hand over an object to a process of this host."""
        held = self.holdings.find(fields["name"])
        fd = held.memory.reading_fd()
        try:
            self.channel.send({"size": held.size, "stamp": held.stamp}, fd=fd)
        finally:
            os.close(fd)

    def read(self, fields: Fields, _payload: bytes) -> None:
        """Send ranges of an object, one after the other."""
        held = self.holdings.find(fields["name"])
        ranges = [(int(start), int(stop)) for start, stop in fields["ranges"]]
        if any(not 0 <= start <= stop <= held.size for start, stop in ranges):
            raise ValueError(f"ranges outside of an object of {held.size} bytes")
        size = sum(stop - start for start, stop in ranges)
        self.channel.send({"stamp": held.stamp, "size": held.size}, follows=size)
        for start, stop in ranges:
            self.channel.send_file(held.memory.fd, start, stop)

    def create(self, fields: Fields, _payload: bytes) -> None:
        """Make room for an object; a process of this host writes into it by itself."""
        self.end_draft()
        draft = self.draft = self.holdings.reserve(fields["name"], int(fields["size"]))
        if self.channel.is_on_host:
            self.channel.send({}, fd=draft.memory.fd)
            return
        self.channel.send({})
        self._receive(draft)
        self.channel.send({})

    def _receive(self, draft: Draft) -> None:
        """Receive the bytes of an object. Its writer may rest, but not go away."""
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.channel.socket.settimeout(None)
        done = 0
        while done < draft.memory.size:
            wanted = buffer[: draft.memory.size - done]
            received = self.channel.socket.recv_into(wanted)
            if not received:
                raise ConnectionError("the writer has gone")
            written = 0
            while written < received:
                written += os.pwrite(draft.memory.fd, buffer[written:received], done + written)
            done += received
        self.channel.socket.settimeout(self.channel.seconds)

    def commit(self, fields: Fields, _payload: bytes) -> None:
        """Make what was written an object."""
        if self.draft is None:
            raise ValueError("nothing is being written")
        size = int(fields.get("size", self.draft.memory.size))
        self.holdings.commit(self.draft, int(fields["stamp"]), size)
        self.draft = None
        self.channel.send({})

    def abort(self, _fields: Fields, _payload: bytes) -> None:
        self.end_draft()
        self.channel.send({})

    def put(self, fields: Fields, payload: bytes) -> None:
        stamp = self.holdings.put(
            fields["name"],
            payload,
            stamp=fields["stamp"],
            above=int(fields["above"]),
            is_new=bool(fields["is_new"]),
        )
        self.channel.send({"stamp": stamp})

    def swap(self, fields: Fields, payload: bytes) -> None:
        data = None if fields["removes"] else payload
        stamp = self.holdings.swap(fields["name"], data, stamp=int(fields["stamp"]))
        self.channel.send({"stamp": stamp})

    def delete(self, fields: Fields, _payload: bytes) -> None:
        self.holdings.delete(fields["names"], up_to=fields["up_to"])
        self.channel.send({})

    def retire(self, fields: Fields, _payload: bytes) -> None:
        gone = self.holdings.retire(fields["directory"], int(fields["keep"]))
        self.channel.send({"gone": gone})

    def end(self, _fields: Fields, _payload: bytes) -> None:
        with suppress(OSError):
            self.channel.send({})
        self.stop()


def _kind_of(error: CheckpointError) -> str:
    if isinstance(error, ObjectNotFound):
        return "missing"
    return "exists" if isinstance(error, ObjectExists) else "storage"


def _told(objects: list[Held]) -> list[Any]:
    return [[held.name, held.size, held.stamp, held.is_fixed] for held in objects]


_REQUESTS: dict[str, Callable[[Session, Fields, bytes], None]] = {
    "status": Session.tell_status,
    "look": Session.look,
    "list": Session.list,
    "open": Session.open,
    "read": Session.read,
    "create": Session.create,
    "commit": Session.commit,
    "abort": Session.abort,
    "put": Session.put,
    "swap": Session.swap,
    "delete": Session.delete,
    "retire": Session.retire,
    "stop": Session.end,
}
