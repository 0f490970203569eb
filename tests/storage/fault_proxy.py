"""A proxy on loopback that stands before a real S3 server and makes trouble, as networks do."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>injected</Message></Error>'
_HOP_BY_HOP = {"content-length", "transfer-encoding", "connection", "content-encoding", "expect"}


@dataclass
class Trouble:
    """What happens to which requests; the fields may be changed at any time."""

    status: int = 503
    code: str = "SlowDown"
    methods: frozenset[str] = frozenset()
    """Of these only; of all where it is empty."""
    match: str = ""
    """Only where the URL has this in it."""
    share: float = 0.0
    """How many of them, by chance."""
    limit: int = 1 << 60
    """At most so many."""
    carry_out: bool = False
    """Whether the server gets the request all the same, only its reply is lost."""
    alter: bool = False
    """Change a bit of the body instead, and take its checksums away."""
    swallow: bool = False
    """Say that all is well instead, and do nothing."""
    late: bool = False
    """Hang up instead, and keep the request for ``FaultProxy.deliver``."""
    meanwhile: Callable[[], object] = lambda: None
    """Called at each of them, before anything is done about it."""
    then: Trouble | None = None
    """What comes once the limit is reached."""
    hits: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def fits(self, request: web.Request) -> bool:
        """Whether this one is in trouble."""
        wanted = (
            self.match in str(request.rel_url)
            and (not self.methods or request.method in self.methods)
            and self.hits < self.limit
            and self.chance.random() < self.share
        )
        self.hits += wanted
        return wanted


class FaultProxy:
    """Forwards to ``upstream`` from a thread of its own."""

    def __init__(self, upstream: str) -> None:
        self.trouble = Trouble()
        self.url = ""
        self._upstream = upstream
        self._kept: list[tuple[str, str, bytes, dict[str, str]]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to listen; then ``url`` is where."""
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _listen(self) -> None:
        self._client = ClientSession(
            connector=TCPConnector(limit=100),
            auto_decompress=False,
            timeout=ClientTimeout(total=60),
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site: Any = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._ready.set()

    async def _close(self) -> None:
        await self._client.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        trouble = self.trouble
        while trouble.then is not None and trouble.hits >= trouble.limit:
            trouble = trouble.then
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        hit = trouble.fits(request)
        if hit:
            trouble.meanwhile()
        if hit and trouble.late:
            self._kept.append((request.method, request.raw_path, body, headers))
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if hit and trouble.swallow:
            return web.Response(status=200, headers={"ETag": '"x"'})
        if hit and trouble.alter and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
            headers = {
                k: v
                for k, v in headers.items()
                if not k.lower().startswith(("content-md5", "x-amz-checksum", "x-amz-sdk-checksum"))
            }
            headers["X-Amz-Content-Sha256"] = "UNSIGNED-PAYLOAD"
        elif hit and not trouble.carry_out:
            return self._refusal(request, trouble)
        url = f"{self._upstream}{request.raw_path}"
        async with self._client.request(
            request.method, url, data=body, headers=headers, allow_redirects=False
        ) as reply:
            told = await reply.read()
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP_BY_HOP}
            if request.method == "HEAD":
                kept["Content-Length"] = reply.headers.get("Content-Length", "0")
        if hit and trouble.carry_out:
            return self._refusal(request, trouble)
        return web.Response(status=reply.status, body=told, headers=kept)

    def _refusal(self, request: web.Request, trouble: Trouble) -> web.Response:
        text = "" if request.method == "HEAD" else _ERROR.format(trouble.code)
        return web.Response(status=trouble.status, text=text, content_type="application/xml")

    def deliver(self) -> list[int]:
        """Pass on what came too late; return the statuses of the replies, which nobody gets."""
        return asyncio.run_coroutine_threadsafe(self._deliver(), self._loop).result(60)

    async def _deliver(self) -> list[int]:
        found: list[int] = []
        for method, path, body, headers in self._kept:
            url = f"{self._upstream}{path}"
            async with self._client.request(method, url, data=body, headers=headers) as reply:
                found.append(reply.status)
        self._kept.clear()
        return found


@contextmanager
def fault_proxy(upstream: str) -> Generator[FaultProxy]:
    """Run a proxy during the block."""
    proxy = FaultProxy(upstream)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
