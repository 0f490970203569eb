"""Sending an object to the agent of another host while it is still being written here."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from dtckpt.errors import StorageError

from .client import Peer

_PIECE_BYTES = 8 << 20


class Progress:
    """How far an object has been written, for those who follow."""

    def __init__(self) -> None:
        self.done = 0
        self.is_given_up = False
        self._changed = threading.Condition()

    def reach(self, done: int) -> None:
        """Tell that so many bytes have been written."""
        with self._changed:
            self.done = done
            self._changed.notify_all()

    def give_up(self) -> None:
        """Tell that no more will be."""
        with self._changed:
            self.is_given_up = True
            self._changed.notify_all()

    def wait_beyond(self, done: int) -> int:
        """Return how much has been written once that is more; ConnectionError if it will not."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_given_up or self.done > done)
            if self.is_given_up:
                raise ConnectionError("its writer has given up")
            return self.done


class Copy:
    """An object on its way to another agent, sent by a thread from where it is written."""

    def __init__(self, peer: Peer, name: str, fd: int, size: int, progress: Progress) -> None:
        """StorageError if the agent has no room for it, ``Lost`` where it does not answer."""
        self.peer = peer
        self._fd = fd
        self._size = size
        self._progress = progress
        self._failure: BaseException | None = None
        # Its own connection: on any other one an answer may be waited for.
        self._channel = peer.take()
        with self._closed_on_error():
            self._channel.send({"op": "create", "name": name, "size": size})
            peer.checked(self._channel.receive())
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="dtckpt-copy", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending: sent when it has been written
            self._thread = None

    def _run(self) -> None:
        try:
            done = 0
            while done < self._size:
                stop = min(self._progress.wait_beyond(done), done + _PIECE_BYTES)
                self._channel.send_file(self._fd, done, stop)
                done = stop
            self.peer.checked(self._channel.receive())
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        """Wait until the agent has all bytes; ``Lost`` or another StorageError if it has not."""
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        with self._closed_on_error():
            if self._failure is not None:
                raise self._failure

    def commit(self, stamp: int, size: int) -> None:
        """Make its first ``size`` bytes an object there; ObjectExists if the name was taken."""
        with self._closed_on_error():
            self._channel.send({"op": "commit", "stamp": stamp, "size": size})
            self.peer.checked(self._channel.receive())
        self.peer.give_back(self._channel)

    def abort(self) -> None:
        """Give it up; the agent forgets what the connection has brought."""
        self._progress.give_up()
        if self._thread is not None:
            self._thread.join()
        self._channel.close()

    @contextmanager
    def _closed_on_error(self) -> Generator[None]:
        """Close the connection where the block fails; its own errors become ``Lost``."""
        try:
            yield
        except BaseException as error:
            self._channel.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise self.peer.lost(error) from error
            raise
