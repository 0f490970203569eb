"""A machine whose metadata service has no credentials: that is no object that is missing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dtckpt.errors import AccessDenied
from dtckpt.storage import Store, open_store
from tests.servers.fake_s3 import BUCKET, fake_s3


class Metadata(BaseHTTPRequestHandler):
    """As on EC2, of a machine that has no role."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"token")

    def do_GET(self) -> None:
        self.send_error(404)


@pytest.fixture
def metadata() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def exists(store: Store) -> None:
    store.exists("x")


def delete(store: Store) -> None:
    store.delete(["x"])


def look(store: Store) -> None:
    list(store.list())


@pytest.mark.parametrize("ask", [exists, delete, look])
def test_no_credentials(
    metadata: str, ask: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with fake_s3() as server:
        options = {"endpoint": server.endpoint, "region": "x", "metadata_endpoint": metadata}
        store = open_store(f"s3://{BUCKET}/run", engine="obstore", **options)
        with pytest.raises(AccessDenied, match="security-credentials"):
            ask(store)
