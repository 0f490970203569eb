"""A large object that is sent in parts, several of which are on their way at a time."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any, final

from .dialects.base import Upload


@final
class Parts:
    """What is written front to back, by one thread, as the parts of an upload.

    Every part has a thread, and fsspec's event loop does the work. Not a pool of
    ``concurrent.futures``: it takes no work once the interpreter is ending, when saves in the
    background still have to finish. With the part that fills, one more is in memory than are on
    their way.
    """

    def __init__(self, upload: Upload, part_bytes: int) -> None:
        self._to = upload
        self._part_bytes = part_bytes
        self._memory: list[bytearray] = []
        self._part = self._unused()
        self._filled = 0
        self._threads: deque[threading.Thread] = deque()
        self._num_parts = 0
        # Filled by the threads, each by its own key; a failure ends the upload.
        self._sent: dict[int, Any] = {}
        self._failed: list[BaseException] = []

    def write(self, view: memoryview) -> None:
        """Take a copy of the bytes of ``view``; waits while too many parts are on their way.

        Raises the error of any part that failed so far.
        """
        while view.nbytes:
            taken = view[: self._part_bytes - self._filled]
            memoryview(self._part)[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == self._part_bytes:
                self._send()

    def close(self) -> None:
        """Send the rest, wait for all parts and complete the object, or raise what went wrong."""
        if self._filled:
            self._send()
        self._wait(0)
        self._to.complete([self._sent[number] for number in sorted(self._sent)])

    def discard(self) -> None:
        """Give up: the server forgets all parts."""
        self._filled = 0
        # A part that arrives after the end of its upload would stay there, and be paid for.
        try:
            with suppress(Exception):
                self._wait(0)
        finally:
            self._to.abort()

    def _send(self) -> None:
        most = self._to.num_in_flight
        self._wait(most - 1)
        self._num_parts += 1
        work = (self._num_parts, memoryview(self._part)[: self._filled])
        self._part = self._unused()
        self._filled = 0
        thread = threading.Thread(target=self._upload, args=work, name="dtckpt-part", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # an interpreter that is ending starts no threads
            self._upload(*work)
            self._wait(most)
        else:
            self._threads.append(thread)

    def _unused(self) -> bytearray:
        """Return memory that nobody reads any more; fresh one would have to be faulted in.

        A connection that was given up may still send of its part, though another has brought it.
        """
        for part in self._memory:
            with suppress(BufferError):  # of what is resized while there are views of it
                part.append(part.pop())
                return part
        fresh = bytearray(self._part_bytes)
        self._memory = [*self._memory[-self._to.num_in_flight - 1 :], fresh]
        return fresh

    def _wait(self, most: int) -> None:
        """Wait until at most so many parts are on their way; raise the first error of any."""
        while len(self._threads) > most:
            self._threads.popleft().join()
        if self._failed:
            raise self._failed[0]

    def _upload(self, number: int, data: memoryview) -> None:
        try:
            self._sent[number] = self._to.send(number, data)
        except BaseException as error:  # it must reach the writer, whatever it is
            self._failed.append(error)
