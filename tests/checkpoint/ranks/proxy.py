"""A network between ranks that can be broken: a proxy before the coordinator."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import pytest

from dtckpt.checkpoint.ranks.greeting import Invitation, Listener

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection that ends with a reset."""


class Network:
    """Passes on what ranks say to each other, until it is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_deaf = False
        """Whether what is sent is swallowed, as by a firewall that drops packets."""
        self.num_connections = 0
        self._answered: set[tuple[socket.socket, socket.socket]] = set()
        self._answer_came = threading.Condition()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._servers: list[socket.socket] = []
        invitation = Listener.invitation

        def through_here(listener: Listener, *args: Any) -> Invitation:
            told = invitation(listener, *args)
            addresses = tuple(("127.0.0.1", self._serve(a)) for a in told.addresses)
            return Invitation(
                addresses=addresses,
                token=told.token,
                welcome=told.welcome,
                size=told.size,
                generation=told.generation,
            )

        monkeypatch.setattr(Listener, "invitation", through_here)

    @property
    def num_answered(self) -> int:
        """How many connections the coordinator has said something over."""
        return len(self._answered)

    def wait_until_answered(self, count: int) -> None:
        """Wait until the coordinator has answered so many connections, in all."""
        with self._answer_came:
            came = self._answer_came.wait_for(lambda: self.num_answered >= count, 60)
        assert came, f"{self.num_answered} of {count} connections were answered"

    def reset(self) -> None:
        """End all connections as a router does that has forgotten them."""
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads
        for pair in self._pairs:
            for end in pair:
                end.close()
        self._pairs.clear()

    def close(self) -> None:
        """End everything."""
        self.reset()
        for server in self._servers:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()

    def _serve(self, address: tuple[str, int]) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        self._servers.append(server)
        threading.Thread(target=self._accept, args=(server, address), daemon=True).start()
        return server.getsockname()[1]

    def _accept(self, server: socket.socket, address: tuple[str, int]) -> None:
        while True:
            try:
                here, _ = server.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(address)
            except OSError:  # nobody listens there any more
                here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                here.close()
                continue
            self.num_connections += 1
            self._pairs.append((here, there))
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_deaf:
                    target.sendall(data)
                    self._note_answer(source, target)
            target.shutdown(socket.SHUT_WR)

    def _note_answer(self, source: socket.socket, target: socket.socket) -> None:
        pair = (target, source)  # as they are kept: an answer goes the other way
        with self._answer_came:
            if pair in self._pairs:
                self._answered.add(pair)
                self._answer_came.notify_all()
