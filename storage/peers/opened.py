"""Objects of this host's agent, opened in this process: reading them is copying memory.

They are read and not mapped: a read finds its pages faster than a process that has none mapped yet.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..base import ReadRequest
from .client import Peer

_MAX_OPENED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """An object that can be read for as long as this exists, even if the agent has let it go."""

    size: int
    stamp: int
    fd: int

    def fill(self, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        """Fill buffers, which lie within the object, and yield each as soon as it is filled."""
        for request in requests:
            view, offset = request.view, request.offset
            while view:
                count = os.preadv(self.fd, [view], offset)
                if not count:
                    raise OSError(f"an object of {self.size} bytes ended at {offset}")
                view, offset = view[count:], offset + count
            yield request

    def __del__(self) -> None:
        os.close(self.fd)


def open_object(peer: Peer, name: str) -> Opened:
    """Return an object of this host's agent; ObjectNotFound or ``Lost`` where that fails."""
    with peer.channel() as channel:
        channel.send({"op": "open", "name": name})
        message = peer.checked(channel.receive(wants_fd=True))
        if message.fd is None:
            raise ConnectionError("an object without a descriptor")
        return Opened(message.fields["size"], message.fields["stamp"], message.fd)


class OpenedObjects:
    """The objects that a store has read last, by name; any thread may use it.

    They keep their memory from being given back, so there are only so many, for as long as the
    store is used.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, Opened] = OrderedDict()
        self._lock = threading.RLock()  # a finalizer may come in between

    def get(self, peer: Peer, name: str, stamp: int) -> Opened:
        """Return an object as it was when it had a stamp, or as it is now."""
        with self._lock:
            found = self._known.get(name)
            if found is not None and found.stamp == stamp:
                self._known.move_to_end(name)
                return found
        found = open_object(peer, name)
        with self._lock:
            self._known[name] = found
            while len(self._known) > _MAX_OPENED:
                self._known.popitem(last=False)
        return found

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._known.clear()
