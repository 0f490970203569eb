"""A server in a thread of this process that makes trouble where it is told to."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from typing import Any, Self

from aiohttp import web

from .faults import Asked, Fault, Kind, Reply, Seen
from .objects import Objects

_PIECE = 1 << 20
_READING: tuple[Kind, ...] = ("get", "head", "list", "list-parts", "list-uploads")


class FakeServer(ABC):
    """Objects in memory behind HTTP on a free port of 127.0.0.1, from ``start`` to ``stop``.

    Requests that come at the same time are carried out one after the other, each in one step.
    Subclasses know a protocol: what is asked for (``understand``), doing it (``carry_out``), and
    what refusals look like (``refusal``).
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        """The first that takes a request is what happens to it."""
        self.latency = 0.0
        """Seconds that every request takes at least."""
        self.bytes_per_second: float | None = None
        """How fast the body of each request or reply goes over the line; None: at once."""
        self.clock_skew = 0.0
        """Seconds that this server is ahead of its clients."""
        self.is_lenient = False
        """Whether it answers requests whatever time they say that they were made."""
        self.objects = Objects(self.now)
        self.seen: list[Seen] = []
        """What was asked, in the order in which it was done with."""
        self.peak = 0
        """The most requests at a time."""
        self.endpoint = ""
        self._busy = 0
        self._kept: list[Asked] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to listen; then ``endpoint`` is where."""
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        """Stop listening; what hangs ends. Stopping again does nothing."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def now(self) -> float:
        """The time on this server."""
        return time.time() + self.clock_skew

    @property
    def counts(self) -> Counter[Kind]:
        """How many requests of each kind there were since ``forget``."""
        return Counter(one.kind for one in list(self.seen))

    def forget(self) -> None:
        """Begin to count anew."""
        self.seen.clear()
        self.peak = self._busy

    def deliver(self) -> list[int]:
        """Carry out what was kept; return the statuses of the replies, which nobody gets."""

        async def carry_out() -> list[int]:
            kept, self._kept = self._kept, []
            return [self.carry_out(asked).status for asked in kept]

        return asyncio.run_coroutine_threadsafe(carry_out(), self._loop).result(60)

    @abstractmethod
    def understand(self, request: web.Request, body: bytes) -> Asked:
        """Say what is asked for."""

    @abstractmethod
    def carry_out(self, asked: Asked) -> Reply:
        """Do it."""

    @abstractmethod
    def refusal(self, asked: Asked, status: int, code: str) -> Reply:
        """Say no as this protocol does."""

    @abstractmethod
    def unconditionally(self, asked: Asked) -> Asked:
        """Take the conditions away."""

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self) -> None:
        await self._listen()
        self._ready.set()
        await self._stopping.wait()
        await self._end()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=1 << 34)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        site: Any = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        self.endpoint = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        """Close all connections: one that still has something to send would outlive the loop."""
        assert self._runner.server is not None
        transports = [each.transport for each in self._runner.server.connections]
        await self._runner.cleanup()
        for transport in transports:
            if isinstance(transport, asyncio.WriteTransport):
                with suppress(AttributeError):  # of one that has closed, and has no loop any more
                    transport.abort()
        await asyncio.sleep(0)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._busy += 1
        self.peak = max(self.peak, self._busy)
        try:
            asked = self.understand(request, await request.read())
            fault = next((fault for fault in self.faults if fault.takes(asked)), None)
            if fault is not None:
                await asyncio.get_running_loop().run_in_executor(None, fault.meanwhile)
            return await self._answer(request, asked, fault or Fault(does="answer"))
        finally:
            self._busy -= 1

    async def _answer(self, request: web.Request, asked: Asked, fault: Fault) -> web.StreamResponse:
        rate = fault.bytes_per_second or self.bytes_per_second
        coming = len(asked.body) / rate if rate else 0.0
        await asyncio.sleep(self.latency + fault.seconds + coming)
        if fault.ignore_conditions:
            asked = self.unconditionally(asked)
        is_silent = fault.does in ("refuse", "reset", "hang") and not fault.carry_out
        reply: Reply | None = None
        if fault.does == "keep":
            self._kept.append(asked)
        elif fault.does == "swallow":
            reply = Reply(headers={"ETag": '"0"'})
        elif fault.does == "alter" and asked.kind not in _READING:
            reply = self.carry_out(_altered(asked))
        elif not is_silent:
            reply = self.carry_out(asked)
        if fault.does == "alter" and asked.kind in _READING and reply is not None:
            reply = Reply(
                status=reply.status, headers=reply.headers, body=flipped(bytes(reply.body))
            )
        if fault.does == "refuse":
            reply = self.refusal(asked, fault.status, fault.code)
            reply.headers.update(fault.headers)
        if reply is None or fault.does in ("reset", "hang"):
            self._note(asked, None, 0)
            if fault.does == "hang":
                await asyncio.Event().wait()
            _hang_up(request)
            return web.Response()
        return await self._send(request, asked, reply, fault, rate)

    async def _send(
        self, request: web.Request, asked: Asked, reply: Reply, fault: Fault, rate: float | None
    ) -> web.StreamResponse:
        sent = web.StreamResponse(status=reply.status, headers=reply.headers)
        sent.headers.setdefault("Date", formatdate(self.now(), usegmt=True))
        whole = memoryview(reply.body)
        if request.method != "HEAD" and reply.status not in (204, 304):
            sent.content_length = len(whole)
        body = whole[:0] if request.method == "HEAD" else whole
        if fault.does in ("truncate", "stall"):
            body = body[: len(body) // 2]
        self._note(asked, reply.status, len(body))
        with suppress(ConnectionError):  # whoever has asked may have hung up
            await self._write(request, sent, body, fault, rate)
        return sent

    async def _write(
        self,
        request: web.Request,
        sent: web.StreamResponse,
        body: memoryview,
        fault: Fault,
        rate: float | None,
    ) -> None:
        await sent.prepare(request)
        piece = _PIECE if rate is None else max(1, min(_PIECE, int(rate / 20)))
        for start in range(0, len(body), piece):
            if rate is not None:
                await asyncio.sleep(len(body[start : start + piece]) / rate)
            await sent.write(body[start : start + piece])
        if fault.does == "stall":
            await asyncio.Event().wait()
        if fault.does == "truncate":
            _hang_up(request)
        else:
            await sent.write_eof()

    def _note(self, asked: Asked, status: int | None, sent: int) -> None:
        self.seen.append(
            Seen(
                kind=asked.kind,
                key=asked.key,
                span=asked.span,
                status=status,
                received=len(asked.body),
                sent=sent,
            )
        )


def _altered(asked: Asked) -> Asked:
    return replace(asked, body=flipped(asked.body))


def flipped(data: bytes) -> bytes:
    """Return the bytes with a bit in the middle changed, if there are any."""
    middle = len(data) // 2
    return (
        data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 1]) + data[middle + 1 :]
    )


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def cut(asked: Asked, size: int) -> tuple[int, int] | None:
    """Return where the range that is asked for starts and stops; None if it is past the end."""
    if asked.span is None:
        return 0, size
    first, last = asked.span
    start = max(0, size + first) if first < 0 else first
    stop = size if last is None else min(last + 1, size)
    return None if start >= size else (start, stop)


numbers = itertools.count(1)
"""For names of uploads."""
