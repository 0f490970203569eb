"""The thread that serves the connections of one rank: it reads, and writes what had to wait.

It ends by itself once nobody holds the wire any more.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Protocol, cast

from dtckpt.logs import logger_of

from .greeting import Greeting, Hello, Listener
from .link import Link

logger = logger_of("checkpoint")

_LINGER_SECONDS = 15.0
"""How long the other end of an ended call may take to read what was sent last."""
_EXIT_SECONDS = 3.0
"""The same while the interpreter exits."""
_ACCEPTED_AT_ONCE = 64
"""So many are let in before those who are there are served again."""
_ERROR_SECONDS = 0.01


class Owner(Protocol):
    """Whom the loop works for."""

    def take(self, link: Link) -> None:
        """Read what has arrived; ConnectionError where nothing more can come."""
        ...

    def lose(self, link: Link, reason: str) -> None:
        """Note that nothing more can come."""
        ...

    def is_known(self, hello: Hello) -> bool:
        """Whether somebody who knows the token is to be met."""
        ...

    def meet(self, hello: Hello, connection: socket.socket) -> None:
        """Take the connection of a rank that has made itself known."""
        ...

    def beat(self) -> float | None:
        """Show the signs of life that are due; return the seconds until the next."""
        ...

    def fail(self, reason: str) -> None:
        """Note that nothing can come from anybody any more."""
        ...


class Loop:
    """Serves links and, on the coordinator, the listener."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener or Listener([])
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._changed: deque[Link] = deque()
        self._ending: set[Link] = set()
        self._is_over = False
        self._thread = 0
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        for listening in self._listener.sockets:
            self._selector.register(listening, selectors.EVENT_READ, self._accept)
        _loops.add(self)

    def start(self, owner: Owner) -> None:
        """Begin to serve; ``owner`` is not kept alive by this."""
        threading.Thread(
            target=_run, args=(self, weakref.ref(owner)), name="dtckpt-wire", daemon=True
        ).start()

    def look_at(self, link: Link) -> None:
        """Serve a link that is new, has something left to send, or is to be ended."""
        self._changed.append(link)
        # Where the other end only has to close, that wakes the thread, if it has not yet done so.
        if not link.is_ending or link.is_behind or link.is_closed:
            self.wake()

    def wake(self) -> None:
        """Have the thread look around, if it is not the caller: it does so soon."""
        if threading.get_ident() != self._thread:
            self.ring()

    def ring(self) -> None:
        """Have the thread look around, whoever calls, the garbage collector in that thread too."""
        with suppress(OSError):
            self._waker.send(b"!")

    def stop(self) -> None:
        """End the thread, which closes all connections."""
        self._is_over = True
        self.ring()

    def settle(self, seconds: float) -> None:
        """Wait until what was sent last has been read at the other ends."""
        limit = time.monotonic() + seconds
        self.wake()
        while (self._ending or self._changed) and time.monotonic() < limit:
            time.sleep(0.005)

    def run(self, owner: weakref.ref[Owner]) -> None:
        """Serve until nobody holds the owner any more."""
        self._thread = threading.get_ident()
        pause: float | None = None
        while True:
            ready = self._selector.select(pause)
            held = owner()
            if held is None or self._is_over:
                return
            pause = self._look_around(ready, held)
            del ready, held  # the next thing may come in hours, and what was served is large

    def _look_around(
        self, ready: list[tuple[selectors.SelectorKey, int]], owner: Owner
    ) -> float | None:
        """Do all that is to be done now; return the seconds until something is due."""
        for key, _ in ready:
            self._handle(key, owner)
        while self._changed:
            link = self._changed.popleft()
            try:
                self._attend(link)
            except Exception as error:
                self._lose(link, owner, error)
        pauses = [owner.beat(), self._expire_greetings(), self._expire_ending()]
        return min((p for p in pauses if p is not None), default=None)

    def _handle(self, key: selectors.SelectorKey, owner: Owner) -> None:
        try:
            key.data(key.fileobj, owner)
        except Exception:
            # Whatever it is that one connection brings, the others go on.
            logger.warning("a connection is given up after an unexpected error", exc_info=True)
            if key.data in (self._accept, self._woken):
                time.sleep(_ERROR_SECONDS)  # not to spin on what comes again
            else:
                self._drop(cast(socket.socket, key.fileobj))

    def _drop(self, connection: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _woken(self, wake: socket.socket, _: Owner) -> None:
        wake.recv(4096)

    def _accept(self, listening: socket.socket, _: Owner) -> None:
        for _number in range(_ACCEPTED_AT_ONCE):
            greeting = self._listener.accept(listening, self._forget)
            if greeting is None:
                return
            self._selector.register(greeting.connection, selectors.EVENT_READ, self._greet)

    def _greet(self, connection: socket.socket, owner: Owner) -> None:
        greeting = self._listener.greeting_of(connection)
        if greeting is None:
            return
        try:
            hello = greeting.read()
            is_member = hello is not None and owner.is_known(hello)
            if is_member:
                greeting.welcome()
        except OSError:  # a stranger
            self._forget(greeting)
            return
        if hello is None:
            return
        if hello.is_probe or not is_member:
            self._forget(greeting)
        else:
            self._selector.unregister(connection)
            self._listener.forget(greeting)
            owner.meet(hello, connection)

    def _forget(self, greeting: Greeting) -> None:
        self._selector.unregister(greeting.connection)
        self._listener.forget(greeting)
        greeting.connection.close()

    def _expire_greetings(self) -> float | None:
        for greeting in self._listener.overdue():
            self._forget(greeting)
        return self._listener.pause()

    def _expire_ending(self) -> float | None:
        if not self._ending:
            return None
        now = time.monotonic()
        for link in [link for link in self._ending if now - link.moved_at > _LINGER_SECONDS]:
            self._close(link)
        return 1.0

    def _attend(self, link: Link) -> None:
        if link.is_closed:
            return
        if link.is_ending:
            self._ending.add(link)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.is_behind else 0)
        self._register(link, events)

    def _serve(self, link: Link, _: socket.socket, owner: Owner) -> None:
        try:
            if link.is_behind:
                link.flush()
                if not link.is_behind:
                    self._register(link, selectors.EVENT_READ)
                    if link.is_ending:
                        link.end_sending()
            owner.take(link)
        except Exception as error:
            self._lose(link, owner, error)

    def _register(self, link: Link, events: int) -> None:
        serve = partial(self._serve, link)
        try:
            self._selector.modify(link.connection, events, serve)
        except KeyError:
            self._selector.register(link.connection, events, serve)

    def _lose(self, link: Link, owner: Owner, error: Exception) -> None:
        # Whatever it is, nothing that follows on this connection can be understood.
        owner.lose(link, str(error) or type(error).__name__)
        self._close(link)

    def _close(self, link: Link) -> None:
        self._ending.discard(link)
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.connection)
        link.close()

    def close(self) -> None:
        """Close everything; only for the thread that serves, and for a forked process."""
        served = self._selector.get_map() or {}  # none where all is closed already
        for key in list(served.values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for link in self._changed:
            link.connection.close()
        self._selector.close()
        self._waker.close()
        self._ending.clear()
        self._changed.clear()


def _run(loop: Loop, owner: weakref.ref[Owner]) -> None:
    reason = "the connections of this rank were closed"
    try:
        loop.run(owner)
    except BaseException as error:
        logger.exception("the thread that serves the connections of this rank has ended")
        what = f"{type(error).__name__}: {error}"
        reason = f"the thread that serves the connections of this rank has ended: {what}"
    finally:
        loop.close()
        held = owner()
        if held is not None:
            held.fail(reason)


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def _settle_at_exit() -> None:
    # The last decision may still be under way to others, and an exit would take it back.
    limit = time.monotonic() + _EXIT_SECONDS
    for loop in list(_loops):
        loop.settle(max(limit - time.monotonic(), 0.0))


def _close_in_child() -> None:
    # A forked data loader must not keep the connections of a dead trainer open.
    for loop in list(_loops):
        loop.close()


atexit.register(_settle_at_exit)
os.register_at_fork(after_in_child=_close_in_child)
