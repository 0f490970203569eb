"""A large object on its way through obstore, in parts, several of them at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, final

from dtckpt.errors import StorageError

from ...base import WriteStream
from ..fsspec.streams import part_bytes

Put = Callable[[Iterable[bytearray], int], object]
"""Makes an object of pieces, of the given number of bytes each; forgets it if they end badly."""


class _GivenUp(Exception):
    """Ends an upload whose object is not wanted any more."""


@final
class Pieces:
    """What one thread writes and another one, obstore, takes; one piece at most waits between."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: bytearray | None = None
        self._end: Literal["", "complete", "given up"] = ""
        self._is_over = False

    def give(self, piece: bytearray) -> None:
        """Hand on a piece once the one before was taken, or drop it if nobody takes any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None or self._is_over)
            self._waiting = piece
            self._changed.notify_all()

    def end(self, how: Literal["complete", "given up"]) -> None:
        """Say that there are no more, and whether the object is wanted."""
        with self._changed:
            self._end = self._end or how
            self._changed.notify_all()

    def over(self) -> None:
        """Say that nobody takes pieces any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether nobody takes pieces any more."""
        return self._is_over

    def __iter__(self) -> Pieces:
        return self

    def __next__(self) -> bytearray:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._end)
            if self._end == "given up":
                raise _GivenUp
            if self._waiting is None:
                raise StopIteration
            piece, self._waiting = self._waiting, None
            self._changed.notify_all()
        return piece


@final
class _Upload:
    """The thread in which obstore makes the object. It does not know the stream."""

    def __init__(self, put: Put, num_bytes: int) -> None:
        self.pieces = Pieces()
        self.failure: BaseException | None = None
        self._held: list[bytearray] | None = None
        self._put, self._num_bytes = put, num_bytes
        self._thread = threading.Thread(target=self._work, name="dtckpt-upload", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # an interpreter that is ending starts no threads
            self._held = []

    def give(self, piece: bytearray) -> None:
        if self._held is not None:
            self._held.append(piece)  # who saves last has nothing left but memory
        else:
            self.pieces.give(piece)
        self._raise()

    def complete(self) -> None:
        if self._held is not None:
            self._put(self._held, self._num_bytes)
            return
        self.pieces.end("complete")
        self._thread.join()
        self._raise()

    def give_up(self) -> None:
        """Have the parts forgotten, and wait until they are."""
        self._held = None
        self.pieces.end("given up")
        if self._thread.ident is not None:
            self._thread.join()

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            self._put(self.pieces, self._num_bytes)
        except BaseException as error:  # it must reach the writer, whatever it is
            self.failure = error
        finally:
            self.pieces.over()


@final
class UploadStream(WriteStream):
    """Sends parts as they fill. What ends before the first one is full goes in one piece."""

    def __init__(
        self,
        where: str,
        size: int,
        put: Put,
        put_whole: Callable[[bytes], None],
        settle: Callable[[int, StorageError | None], None],
    ) -> None:
        """``settle(size, error)`` is called after ``put`` has ended, well or badly.

        It raises if the store does not have an object of this size then.
        """
        super().__init__(where, size)
        self._put, self._put_whole, self._settle = put, put_whole, settle
        self._part_bytes = part_bytes(size)
        self._filling = bytearray()
        self._upload: _Upload | None = None
        self._guard: Any = None

    def _append(self, view: memoryview) -> None:
        while view.nbytes:
            room = self._part_bytes - len(self._filling)
            if not room:
                self._send()
                continue
            self._filling += view[:room]
            view = view[room:]

    def _send(self) -> None:
        if self._upload is None:
            self._upload = _Upload(self._put, self._part_bytes)
            # A stream that is dropped without an end leaves no parts behind.
            self._guard = weakref.finalize(self, self._upload.give_up)
        piece, self._filling = self._filling, bytearray()  # obstore reads where it lies
        self._upload.give(piece)

    def _finish(self) -> None:
        if self._upload is None:
            self._put_whole(bytes(self._filling))
            return
        try:
            if self._filling:
                self._send()
            self._upload.complete()
        except StorageError as error:
            self._settle(self._announced, error)
        else:
            self._settle(self._announced, None)
        self._guard.detach()

    def _discard(self) -> None:
        self._filling = bytearray()
        if self._guard is not None:
            self._guard()
