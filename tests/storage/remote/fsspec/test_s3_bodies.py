"""What goes out is what was given, of the same memory; to S3 with checksums, and counted."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiobotocore.httpchecksum import AioAwsChunkedWrapper
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpchecksum import Crc32Checksum

from dtckpt.errors import StorageError
from dtckpt.storage import open_store
from dtckpt.storage.remote.fsspec.dialects.s3_bodies import body_of
from dtckpt.storage.remote.fsspec.parts import Parts
from dtckpt.storage.remote.fsspec.streams import PART_BYTES
from dtckpt.storage.remote.requests import Requests

from ....servers.fake_s3 import BUCKET, FakeS3, fake_s3
from ....servers.faults import Asked

# botocore warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DATA = os.urandom((1 << 20) + 17)


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as running:
        yield running


class Writer:
    """A connection as aiohttp writes to it."""

    def __init__(self) -> None:
        self.sent: list[memoryview] = []

    async def write(self, piece: memoryview) -> None:
        self.sent.append(piece)


def client(session: type | None = AIOHTTPSession) -> Any:
    """Return as much of a client of aiobotocore as bodies are made for."""

    def register(*_: object, unique_id: str) -> None:
        assert unique_id

    events = SimpleNamespace(register=register)
    config = SimpleNamespace(http_session_cls=session)
    return SimpleNamespace(meta=SimpleNamespace(events=events, config=config))


def sent(body: Any, length: int | None = None) -> bytes:
    """Return what aiohttp sends of a body."""
    writer = Writer()
    asyncio.run(body.write_with_length(writer, length))
    return b"".join(writer.sent)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, PART_BYTES + (1 << 20)])
def test_bodies_arrive_with_checksums_of_theirs(server: FakeS3, size: int) -> None:
    arrived: list[Asked] = []
    understand = server.understand

    def note(request: Any, body: bytes) -> Asked:
        arrived.append(understand(request, body))
        return arrived[-1]

    server.understand = note
    data = os.urandom(size)
    store = open_store(f"s3://{BUCKET}/run", **server.storage_options)
    with store.create("x", size) as stream:
        stream.write(data)
    bodies = [asked for asked in arrived if asked.kind in ("put", "upload-part")]
    assert len(bodies) == (2 if size > PART_BYTES else 1)
    for asked in bodies:
        digest = hashlib.sha256(asked.body).hexdigest()
        assert asked.headers["x-amz-content-sha256"] == digest
        told = base64.b64decode(asked.headers["x-amz-checksum-crc32"])
        assert int.from_bytes(told) == zlib.crc32(asked.body)
    bodies.sort(key=lambda asked: asked.query.get("partNumber", ""))
    assert b"".join(asked.body for asked in bodies) == store.read("x") == data


def test_a_body_is_not_copied() -> None:
    memory = bytearray(DATA)
    body = body_of(client(), memoryview(memory))
    assert len(body) == body.size == len(DATA)
    assert body.read(10).obj is memory
    writer = Writer()
    asyncio.run(body.write(writer))
    assert all(piece.obj is memory for piece in writer.sent)
    assert b"".join(writer.sent) == DATA  # from its start, wherever it was read to


def test_a_body_is_a_file() -> None:
    body, like = body_of(client(), DATA), io.BytesIO(DATA)
    for size in (5, 1 << 20, 7, None, 3):
        assert body.read(size) == like.read(size)
        assert body.tell() == like.tell()
    body.seek(3)
    assert body.read(-1) == DATA[3:]


def test_no_more_is_sent_than_was_announced() -> None:
    assert sent(body_of(client(), DATA), 300_001) == DATA[:300_001]


def test_over_tls_it_is_sent_in_chunks_with_a_checksum_behind() -> None:
    async def framed(body: Any) -> bytes:
        wrapper = AioAwsChunkedWrapper(body, checksum_cls=Crc32Checksum, checksum_name="crc")
        return b"".join([chunk async for chunk in wrapper if chunk])

    assert asyncio.run(framed(body_of(client(), DATA))) == asyncio.run(framed(io.BytesIO(DATA)))


def test_each_time_that_a_body_is_sent_counts() -> None:
    class Refused(Exception):
        response = {"ResponseMetadata": {"HTTPStatusCode": 412}}  # noqa: RUF012

    def is_certain(times: int) -> bool:
        requests = Requests()
        with suppress(Refused), requests.attempt():
            for _ in range(times):
                sent(body_of(client(), DATA))
            raise Refused
        return requests.is_last_word(StorageError("refused"))

    assert [is_certain(times) for times in (0, 1, 2)] == [False, True, False]


def test_other_clients_get_bytes() -> None:
    assert body_of(client(None), memoryview(b"12")) == b"12"


PART = 1000


class Sink:
    """An upload that notes what it is given."""

    num_in_flight = 4

    def __init__(self) -> None:
        self.sent: dict[int, bytes] = {}
        self.memory: set[int] = set()
        self.kept: dict[int, memoryview] = {}

    def send(self, number: int, data: memoryview) -> Any:
        self.sent[number] = bytes(data)
        self.memory.add(id(data.obj))
        if number % 3 == 1:
            self.keep(number, data)
        return number

    def keep(self, number: int, data: memoryview) -> None:
        """What a connection does that has not sent all of a part yet."""

    def complete(self, parts: list[Any]) -> None:
        assert parts == sorted(self.sent)

    def abort(self) -> None:
        raise AssertionError("nothing is wrong")


def send(upload: Sink, data: bytes) -> None:
    """Send an object as savers do."""
    parts = Parts(upload, PART)
    for start in range(0, len(data), 300):
        parts.write(memoryview(data)[start : start + 300])
    parts.close()


def test_memory_of_parts_is_used_again() -> None:
    upload, data = Sink(), os.urandom(20 * PART + 1)
    send(upload, data)
    assert b"".join(upload.sent[number] for number in sorted(upload.sent)) == data
    assert len(upload.memory) <= upload.num_in_flight + 1


def test_memory_that_is_still_sent_of_is_left_alone() -> None:
    class Slow(Sink):
        def keep(self, number: int, data: memoryview) -> None:
            self.kept[number] = data

    upload, data = Slow(), os.urandom(20 * PART + 1)
    send(upload, data)
    assert b"".join(upload.sent[number] for number in sorted(upload.sent)) == data
    assert len(upload.kept) == 7
    assert {number: bytes(view) for number, view in upload.kept.items()} == {
        number: upload.sent[number] for number in upload.kept
    }
