"""A server of what lies in a store, for one step at a time: ranges of objects over HTTP."""

from __future__ import annotations

import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from dtckpt.errors import ObjectNotFound

from ...storage.base import Store

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
WRONG_STEP = 409


class SnapshotServer:
    """Serves the objects of a store as ``/STEP/NAME`` until another one, or none, is offered."""

    def __init__(self, timeout: float) -> None:
        self._offered: tuple[int, Store] | None = None
        self._server = _Server(("", 0), _handler(self, timeout))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="dtckpt-torchft", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Where others reach it, without the step."""
        return f"http://{socket.gethostname()}:{self._server.server_address[1]}"

    def offer(self, step: int, store: Store) -> None:
        """Serve this from now on, and nothing else."""
        self._offered = (step, store)

    def withdraw(self) -> None:
        """Serve nothing, and let go of what was served."""
        self._offered = None

    def close(self, *, wait: bool) -> None:
        """End the server."""
        self.withdraw()
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        if wait:
            ending.join()

    def _end(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def at(self, step: int) -> Store | int:
        """Return the store of a step, or the step that is served in its place; -1 for none."""
        offered = self._offered
        if offered is None:
            return -1
        return offered[1] if offered[0] == step else offered[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _handler(server: SnapshotServer, seconds: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # one connection serves many requests
        timeout = seconds

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            step, _, name = unquote(self.path).removeprefix("/").partition("/")
            found = server.at(int(step)) if step.isdecimal() else -1
            if isinstance(found, int):
                self._refuse(WRONG_STEP, f"step {found} is served" if found >= 0 else "no step is")
                return
            try:
                size = found.stat(name).size
            except (ObjectNotFound, ValueError):
                self._refuse(404, f"there is no {name}")
                return
            told = _RANGE.fullmatch(self.headers.get("Range", ""))
            start, stop = (int(told[1]), min(int(told[2]) + 1, size)) if told else (0, size)
            body = found.read(name, start, stop) if with_body and start < stop else b""
            self.send_response(206 if told else 200)
            self.send_header("Content-Length", str(len(body) if with_body else size))
            self.end_headers()
            self.wfile.write(body)

        def _refuse(self, code: int, why: str) -> None:
            self.send_response(code, why)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: an error is told to who asked."""

    return Handler
