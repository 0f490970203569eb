"""A directory that a plain server of HTTP hands out: it knows no ranges, and lists no sizes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dtckpt.errors import ObjectNotFound, StorageError
from dtckpt.storage import Level, ObjectInfo, Store, open_store

pytest.importorskip("aiohttp")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "run/d").mkdir(parents=True)
    (tmp_path / "run/x").write_bytes(b"0123456789")
    (tmp_path / "run/d/y").write_bytes(b"y")
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield open_store(f"http://127.0.0.1:{server.server_port}/run")
        finally:
            server.shutdown()
            thread.join()


def test_what_begins_at_the_start_is_cut(store: Store) -> None:
    assert store.read("x") == store.read_start("x", 20) == b"0123456789"
    assert store.read("x", 0, 4) == store.read_start("x", 4) == b"0123"
    with pytest.raises(StorageError):
        store.read("x", 2, 4)
    with pytest.raises(ObjectNotFound):
        store.read("z")


def test_sizes_are_asked_for(store: Store) -> None:
    assert list(store.list()) == [ObjectInfo("d/y", 1), ObjectInfo("x", 10)]
    assert store.level() == Level((ObjectInfo("x", 10),), ("d",))
