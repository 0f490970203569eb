"""Writing an object into the memory of this host's agent, and of others at the same time."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from dtckpt.errors import StorageError
from dtckpt.logs import logger_of

from ..base import WriteStream
from ..failures import translated
from .client import Lost, Peer
from .copying import Copy, Progress
from .crew import Crew

logger = logger_of("storage")


class PeersStream(WriteStream):
    """An object in the memory of this host's agent, and of others, as far as there are so many."""

    def __init__(self, where: str, name: str, size: int, crew: Crew, num_copies: int) -> None:
        super().__init__(where, size)
        self._name = name
        self._reserved = size
        self._own = crew.own
        self._crew = crew
        self._num_others = num_copies - 1
        self._tried: set[Peer] = set()
        self._progress = Progress()
        self._copies: list[Copy] = []
        self._committed: list[Peer] = []
        self._stamp = 0
        self._fd = -1
        self._channel = self._own.take()
        try:
            self._reserve()
            self._begin_copies()
        except BaseException as error:
            self._abort_because(error)
            raise

    def _reserve(self) -> None:
        with self._asking():
            request = {"op": "create", "name": self._name, "size": self._reserved}
            self._channel.send(request)
            message = self._own.checked(self._channel.receive(wants_fd=True))
            if message.fd is None:
                raise ConnectionError("it gave no memory")
            self._fd = message.fd

    def _begin_copies(self) -> list[Copy]:
        """Begin as many copies as are wanting, and return them; fewer if no more agents answer."""
        begun: list[Copy] = []
        if len(self._copies) == self._num_others:
            return begun
        for peer in self._crew.beside_own():
            if len(self._copies) == self._num_others:
                break
            if peer in self._tried:
                continue
            self._tried.add(peer)
            try:
                copy = Copy(peer, self._name, self._fd, self._reserved, self._progress)
            except Lost as error:
                logger.warning("%s: %s", self._where, error)
            else:
                begun.append(copy)
                self._copies.append(copy)
        return begun

    def _append(self, view: memoryview) -> None:
        done = 0
        with translated(f"write {view.nbytes} bytes at {self._size} of", self._where):
            while done < view.nbytes:
                done += os.pwrite(self._fd, view[done:], self._size + done)
        self._progress.reach(self._size + done)

    def _finish(self) -> None:
        # Others were promised as many bytes as were reserved; they drop what is beyond the end.
        self._progress.reach(self._reserved)
        self._complete_copies()
        self._stamp = time.time_ns()
        copies = {copy.peer: copy for copy in self._copies}
        # All writers of a name go the same way, so that one of them comes first everywhere.
        for peer in sorted([self._own, *copies], key=lambda peer: peer.host):
            if peer is self._own:
                with self._asking():
                    commit = {"op": "commit", "stamp": self._stamp, "size": self._size}
                    self._channel.send(commit)
                    self._own.checked(self._channel.receive())
            else:
                try:
                    copies[peer].commit(self._stamp, self._size)
                except Lost as error:
                    logger.warning("%s: a copy was lost: %s", self._where, error)
                    continue
            self._committed.append(peer)
        self._own.give_back(self._channel)
        self._close_fd()

    def _complete_copies(self) -> None:
        """Wait until others have all bytes; who was lost meanwhile is replaced by somebody else.

        Agents that have come since the object was begun are asked, too.
        """
        waiting = self._copies[:]
        while waiting := waiting or self._begin_copies():
            copy = waiting.pop(0)
            try:
                copy.wait()
            except Lost as error:
                logger.warning("%s: %s", self._where, error)
                self._copies.remove(copy)
        wanting = self._num_others - len(self._copies)
        if wanting and self._crew.job.spans_hosts:
            logger.warning(
                "%s: held by %d hosts, not by %d: no other agent answers%s",
                self._where,
                len(self._copies) + 1,
                self._num_others + 1,
                self._crew.silent(),
            )

    def _discard(self) -> None:
        self._progress.give_up()
        for copy in self._copies:
            copy.abort()
        with suppress(StorageError, OSError):
            # Asked for, so that the memory is free when this returns.
            if not self._committed:
                self._channel.send({"op": "abort"})
                self._channel.receive()
        self._channel.close()
        self._close_fd()
        for peer in self._committed:
            with suppress(StorageError):
                peer.ask("delete", names=[self._name], up_to=self._stamp)

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _asking(self) -> _Asking:
        return _Asking(self._own, self._where)

    def __del__(self) -> None:
        if self._state in ("open", "failed") and self._fd >= 0:
            with suppress(StorageError):
                self.abort()


class _Asking:
    """Turns what fails on a connection in the block into the loss of the agent."""

    def __init__(self, peer: Peer, where: str) -> None:
        self._peer = peer
        self._where = where

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise self._peer.lost(error) from error
