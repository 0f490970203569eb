"""One connection between a member and the coordinator, for one call."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from .frames import Frame, FrameReader

_READ_BYTES = 1 << 20


class Link:
    """A connection that never makes a sender wait: what it does not take now is kept for later.

    Any thread sends; only the thread of the loop reads, writes what is left, and closes.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        *,
        call: int = 0,
        purpose: str = "",
        target: int = 0,
        welcome: bytes = b"",
    ) -> None:
        connection.setblocking(False)
        self.rank = rank
        """The rank at the other end."""
        self.connection = connection
        self.call = call
        """The number of the call that the other end is at."""
        self.purpose = purpose
        """What it calls."""
        self.target = target
        """What it calls for."""
        self.part_of: Any = None
        """The call that the frames are for; until it is known they are kept in ``early``."""
        self.early: list[Frame] = []
        self.lost = ""
        """Why nothing more can come."""
        self.is_ending = False
        """Whether nothing more is to be sent."""
        self.moved_at = time.monotonic()
        """When bytes went either way."""
        self._welcome = welcome
        self._reader = FrameReader()
        self._left: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._broken = False

    @property
    def is_behind(self) -> bool:
        """Whether something has still to be sent."""
        return bool(self._left)

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed."""
        return self.connection.fileno() == -1

    def send(self, frame: bytes) -> None:
        """Send a frame, or keep what the connection does not take; OSError if it is broken.

        After an error nothing is sent any more: half a frame may be under way.
        """
        with self._lock:
            if self._broken or self.is_ending:
                return
            self._left.append(memoryview(frame))
            if len(self._left) == 1:
                self._write()

    def flush(self) -> None:
        """Send what is left, as far as the connection takes it; OSError if it is broken."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        try:
            while self._left:
                sent = self.connection.send(self._left[0])
                self.moved_at = time.monotonic()
                if sent < len(self._left[0]):
                    self._left[0] = self._left[0][sent:]
                else:
                    self._left.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._broken = True
            self._left.clear()
            raise

    def end_sending(self) -> None:
        """Let the other end know that nothing follows, once everything is sent."""
        with self._lock:
            self.is_ending = True
            if not self._left:
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection while nobody sends: others may get its descriptor's number."""
        with self._lock:
            self._broken = True
            self._left.clear()
            self.connection.close()

    def read(self) -> list[Frame]:
        """Return the frames that have arrived; ConnectionError at the end of the connection."""
        try:
            received = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not received:
            raise ConnectionError("it closed its connection: its process ended or left")
        self.moved_at = time.monotonic()
        if self._welcome:
            part = received[: len(self._welcome)]
            if not self._welcome.startswith(part):
                raise ConnectionError("somebody else listens where it did")
            self._welcome = self._welcome[len(part) :]
            received = received[len(part) :]
        return self._reader.frames(received)
