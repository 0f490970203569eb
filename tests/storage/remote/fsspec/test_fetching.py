"""Reads of a server that counts its requests, and sometimes breaks off."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import fsspec.asyn
import pytest
from aiohttp import ClientPayloadError

from dtckpt.errors import ObjectNotFound, StorageError
from dtckpt.storage import Store, open_store
from dtckpt.storage.base import ReadRequest
from dtckpt.storage.remote.asking import Connection
from dtckpt.storage.remote.fsspec.fetching import NUM_FETCHES, NUM_LARGE, fetch_each

from ....servers.fake_s3 import BUCKET, FakeS3, fake_s3
from ....servers.faults import Fault

MIB = 1 << 20
DATA = bytes(range(256)) * (20 * MIB // 256)


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as running:
        running.objects.put(BUCKET, "run/x", DATA)
        yield running


@pytest.fixture
def store(server: FakeS3) -> Store:
    return open_store(f"s3://{BUCKET}/run", **server.storage_options)


def pieces(start: int, stop: int, step: int = MIB) -> list[ReadRequest]:
    """Return requests for neighbours."""
    sizes = [min(step, stop - low) for low in range(start, stop, step)]
    lows = range(start, stop, step)
    return [ReadRequest(low, bytearray(size)) for low, size in zip(lows, sizes, strict=True)]


def asked(server: FakeS3) -> list[tuple[str, tuple[int, int | None] | None]]:
    """Return kinds and ranges of all requests, in the order of the ranges."""
    return sorted(((one.kind, one.span) for one in server.seen), key=str)


def test_sixty_four_pieces_are_four_requests(server: FakeS3) -> None:
    server.objects.put(BUCKET, "run/large", bytes(64 * MIB))
    store = open_store(f"s3://{BUCKET}/run", **server.storage_options)
    store.read_into("large", pieces(0, 64 * MIB))
    assert server.counts == {"get": 4}


def test_ends_of_a_small_object_are_one_request(server: FakeS3, store: Store) -> None:
    server.objects.put(BUCKET, "run/small", DATA[:MIB])
    ends = [ReadRequest(0, bytearray(10)), ReadRequest(MIB - 5, bytearray(5))]
    store.read_into("small", ends)
    assert [bytes(request.view) for request in ends] == [DATA[:10], DATA[MIB - 5 : MIB]]
    assert asked(server) == [("get", (0, MIB - 1))]


def test_requests_are_yielded_as_they_fill(server: FakeS3, store: Store) -> None:
    server.faults.append(Fault(kinds=["get"], does="stall", limit=1))
    reading = store.read_each("x", pieces(0, 8 * MIB))
    assert isinstance(reading, Generator)
    first = next(reading)
    assert bytes(first.view) == DATA[first.offset : first.offset + MIB]
    # The rest never comes. Whoever closes does not wait for it, and no buffer is touched later.
    reading.close()
    assert server.counts == {"get": 1}
    assert not [
        task for task in asyncio.all_tasks(fsspec.asyn.get_loop()) if "fill" in str(task.get_coro())
    ]


@pytest.mark.parametrize("what", ["read", "write"])
def test_what_was_dropped_may_end_on_the_loop(server: FakeS3, store: Store, what: str) -> None:
    class Dropped:
        """Only the garbage collector finds it, in whatever thread that runs."""

        def __init__(self) -> None:
            self.itself = self
            if what == "read":
                self.held: Any = store.read_each("x", pieces(0, 8 * MIB))
                next(self.held)
            else:
                self.held = store.create("y", 40 * MIB)
                self.held.write(DATA)

    async def collect() -> None:
        gc.collect()

    server.faults.append(Fault(kinds=["get"], does="stall", limit=1))
    gc.disable()
    try:
        Dropped()
        asyncio.run_coroutine_threadsafe(collect(), fsspec.asyn.get_loop()).result(30)
    finally:
        gc.enable()
    assert store.stat("x").size == len(DATA)
    while server.uploads:
        time.sleep(0.01)


LEFT_OPEN = """
import json, sys
from dtckpt.storage import ReadRequest, open_store
store = open_store(sys.argv[1], **json.loads(sys.argv[2]))
reading = store.read_each("x", [ReadRequest(low << 20, bytearray(1)) for low in (0, 17)])
next(reading)
"""


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_an_interpreter_ends_with_a_reader_left_open(server: FakeS3, engine: str) -> None:
    if engine == "obstore":
        pytest.importorskip("obstore")
    server.faults.append(Fault(kinds=["get"], does="hang", skip=1))
    options = json.dumps(server.storage_options | {"engine": engine})
    command = [sys.executable, "-c", LEFT_OPEN, f"s3://{BUCKET}/run", options]
    subprocess.run(command, check=True, timeout=60)


def test_a_reply_that_breaks_off_is_asked_for_from_there(server: FakeS3, store: Store) -> None:
    server.faults.append(Fault(kinds=["get"], does="truncate", limit=1))
    request = ReadRequest(0, bytearray(8 * MIB))
    store.read_into("x", [request])
    assert request.view == DATA[: 8 * MIB]
    (_, first), (_, again) = asked(server)
    assert first == (0, 8 * MIB - 1)
    assert again is not None
    assert 0 < again[0] <= 4 * MIB
    assert again[1] == 8 * MIB - 1


def test_two_versions_of_an_object_are_not_put_together(server: FakeS3, store: Store) -> None:
    def replace() -> None:
        server.objects.put(BUCKET, "run/x", DATA[::-1])

    server.faults.append(Fault(kinds=["get"], does="truncate", limit=1))
    server.faults.append(Fault(kinds=["get"], does="answer", limit=1, meanwhile=replace))
    with pytest.raises(StorageError, match="cannot read"):
        store.read_into("x", [ReadRequest(0, bytearray(8 * MIB))])


def test_a_server_that_always_breaks_off(server: FakeS3) -> None:
    server.faults.append(Fault(kinds=["get"], does="truncate"))
    store = open_store(f"s3://{BUCKET}/run", **server.storage_options, deadline=1)
    with pytest.raises(StorageError, match=f"cannot read s3://{BUCKET}/run/x"):
        store.read_into("x", [ReadRequest(0, bytearray(100))])


def test_reading_past_the_end_names_the_range(store: Store) -> None:
    size = len(DATA)
    with pytest.raises(StorageError, match=f"cannot read bytes {size - 5}:{size + 5}.*{size}"):
        store.read_into("x", [*pieces(0, MIB), ReadRequest(size - 5, bytearray(10))])
    with pytest.raises(StorageError, match=f"cannot read bytes {size}:{size + 1}.*{size}"):
        store.read_into("x", [ReadRequest(size, bytearray(1))])
    with pytest.raises(ObjectNotFound):
        store.read_into("y", [ReadRequest(0, bytearray(1))])


def test_the_start_of_an_object_is_one_request(server: FakeS3, store: Store) -> None:
    assert store.read_start("x", 10) == DATA[:10]
    assert store.read_start("x", len(DATA) + 10) == DATA
    assert server.counts == {"get": 2}
    server.objects.put(BUCKET, "run/empty", b"")
    assert store.read_start("empty", 10) == b""
    with pytest.raises(ObjectNotFound):
        store.read_start("y", 10)


def test_not_too_many_requests_are_on_their_way(server: FakeS3, store: Store) -> None:
    server.latency = 0.2
    small = [ReadRequest(2 * MIB * (n % 9), bytearray(1)) for n in range(8)]
    threads = [threading.Thread(target=store.read_into, args=("x", small)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.counts == {"get": 64}
    assert 1 < server.peak <= NUM_FETCHES


def test_not_too_much_is_on_its_way(
    server: FakeS3, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtckpt.storage.remote.ranges.FETCH_BYTES", MIB // 2)
    monkeypatch.setattr("dtckpt.storage.remote.fsspec.fetching.REQUEST_BYTES", MIB // 4)
    server.latency = 0.05
    request = ReadRequest(0, bytearray(len(DATA)))
    store.read_into("x", [request])
    assert request.view == DATA
    assert server.counts == {"get": 40}
    assert 1 < server.peak <= NUM_LARGE


class NoEnd:
    """A driver of S3 whose replies break off behind their last byte, before they have ended."""

    async_impl = True
    protocol = "s3"

    def __init__(self) -> None:
        self.loop = fsspec.asyn.get_loop()
        self.ranges: list[str] = []

    def call_s3(self) -> None:
        """By this it is known."""

    def split_path(self, path: str) -> tuple[str, str, None]:
        return "bucket", path, None

    async def _call_s3(self, _: str, *, Range: str, **_others: str) -> Any:
        self.ranges.append(Range)
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        # Servers do not know a range that ends before it begins, and give all.
        return {"Body": NoEndBody(DATA[first : last + 1] if last >= first else DATA)}


class NoEndBody:
    def __init__(self, data: bytes) -> None:
        self.left = data

    async def __aenter__(self) -> NoEndBody:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self, most: int) -> bytes:
        if not self.left:
            raise ClientPayloadError("not enough data for the transfer length header")
        data, self.left = self.left[:most], self.left[most:]
        return data


async def fills() -> None:
    """Wait for what still goes on although its bytes are there."""
    await asyncio.gather(*(t for t in asyncio.all_tasks() if "fetch_each" in str(t.get_coro())))


def test_a_reply_that_breaks_off_behind_its_last_byte_is_not_asked_for_again() -> None:
    driver = NoEnd()
    requests = [ReadRequest(low, bytearray(10)) for low in (0, 10 * MIB)]
    found = list(fetch_each(Connection(driver, 10.0), "x", "x", requests))
    assert [bytes(request.view) for request in requests] == [DATA[:10]] * 2
    assert len(found) == 2
    asyncio.run_coroutine_threadsafe(fills(), driver.loop).result()
    assert sorted(driver.ranges) == ["bytes=0-9", f"bytes={10 * MIB}-{10 * MIB + 9}"]
