"""The S3 server of the tests: what every store does on it, and each of its faults."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from dtckpt.storage import Store, open_store
from dtckpt.storage.remote.fsspec import streams as fsspec_streams

from ..storage.conformance import DATA, Raw, StoreTests, names
from .fake_s3 import BUCKET, FakeS3, fake_s3
from .faults import Fault
from .objects import RawObjects

# botocore warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = f"/{BUCKET}/"


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as running:
        yield running


class TestFakeS3(StoreTests):
    num_races = 3

    @pytest.fixture(scope="class")
    def running(self) -> Iterator[FakeS3]:
        with fake_s3() as running:
            yield running

    @pytest.fixture(scope="class")
    def whole(self, running: FakeS3) -> Store:
        return open_store(f"s3://{BUCKET}", **running.storage_options)

    @pytest.fixture
    def store(self, whole: Store) -> Store:
        return whole.substore(uuid.uuid4().hex)

    @pytest.fixture
    def raw(self, running: FakeS3, store: Store) -> Raw:
        return RawObjects(running.objects, BUCKET, store.url.removeprefix(f"s3://{BUCKET}/"))


def ask(
    server: FakeS3,
    method: str,
    path: str,
    body: bytes = b"",
    seconds: float = 10.0,
    **headers: str,
) -> tuple[int, bytes, dict[str, str]]:
    """Make one request, without a driver that makes others of it."""
    line = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=seconds)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        line.request(method, path, body=body, headers=given)
        reply = line.getresponse()
        return reply.status, reply.read(), {k.lower(): v for k, v in reply.headers.items()}
    finally:
        line.close()


def put(
    server: FakeS3, key: str = "x", data: bytes = DATA, seconds: float = 10.0, **headers: str
) -> int:
    return ask(server, "PUT", ROOT + key, data, seconds, **headers)[0]


@pytest.fixture
def client(server: FakeS3) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}),
    )


def code_of(error: ClientError) -> str:
    return error.response["Error"]["Code"]


def test_ranges(server: FakeS3) -> None:
    put(server)
    status, body, headers = ask(server, "GET", f"{ROOT}x", Range="bytes=3-7")
    assert (status, body) == (206, DATA[3:8])
    assert headers["content-range"] == f"bytes 3-7/{len(DATA)}"
    assert ask(server, "GET", f"{ROOT}x", Range="bytes=-5")[1] == DATA[-5:]
    assert ask(server, "GET", f"{ROOT}x", Range=f"bytes={len(DATA)}-")[0] == 416
    assert ask(server, "GET", f"{ROOT}x", Range="bytes=5-99999")[1] == DATA[5:]
    assert server.seen[1].span == (3, 7)


def test_conditions_of_a_put(server: FakeS3) -> None:
    assert put(server, If_None_Match="*") == 200
    assert put(server, If_None_Match="*") == 412
    etag = ask(server, "HEAD", f"{ROOT}x")[2]["etag"]
    assert put(server, data=b"second", If_Match=etag) == 200
    assert put(server, data=b"third", If_Match=etag) == 412
    assert put(server, "missing", If_Match=etag) == 404
    assert server.keys["x"].data == b"second"
    assert ask(server, "DELETE", f"{ROOT}x", If_Match=etag)[0] == 412
    etag = ask(server, "HEAD", f"{ROOT}x")[2]["etag"]
    assert ask(server, "DELETE", f"{ROOT}x", If_Match=etag)[0] == 204


def test_one_of_many_creates(server: FakeS3) -> None:
    barrier = threading.Barrier(8)

    def create(number: int) -> int:
        barrier.wait(10)
        return put(server, data=bytes([number]), If_None_Match="*")

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(create, range(8))) == [200] + [412] * 7


def test_an_upload_in_parts(server: FakeS3, client: Any) -> None:
    target = {"Bucket": BUCKET, "Key": "big"}
    upload = target | {"UploadId": client.create_multipart_upload(**target)["UploadId"]}
    pieces = [os.urandom(5 << 20), b"the end"]
    parts = [
        {"PartNumber": n, "ETag": client.upload_part(**upload, PartNumber=n, Body=data)["ETag"]}
        for n, data in enumerate(pieces, start=1)
    ]
    assert [p["Size"] for p in client.list_parts(**upload)["Parts"]] == [5 << 20, 7]
    assert [u["Key"] for u in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]] == ["big"]
    assert "big" not in server.keys
    put(server, "big", b"somebody else's")
    with pytest.raises(ClientError) as caught:
        client.complete_multipart_upload(
            **upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
        )
    assert code_of(caught.value) == "PreconditionFailed"
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert server.keys["big"].data == b"".join(pieces)
    assert server.keys["big"].etag.endswith("-2")
    with pytest.raises(ClientError) as caught:
        client.abort_multipart_upload(**upload)
    assert code_of(caught.value) == "NoSuchUpload"


def test_parts_that_are_too_small(server: FakeS3, client: Any) -> None:
    target = {"Bucket": BUCKET, "Key": "big"}
    upload = target | {"UploadId": client.create_multipart_upload(**target)["UploadId"]}
    parts = [
        {"PartNumber": n, "ETag": client.upload_part(**upload, PartNumber=n, Body=b"x")["ETag"]}
        for n in (1, 2)
    ]
    with pytest.raises(ClientError) as caught:
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert code_of(caught.value) == "EntityTooSmall"
    assert server.counts["upload-part"] == 2


def test_lists_in_pages(server: FakeS3, client: Any) -> None:
    keys = [f"a/{n}/x y+&" for n in range(7)] + ["a.", "a/0", "b"]
    for key in keys:
        server.objects.put(BUCKET, key, b"x")
    pages = client.get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=BUCKET, PaginationConfig={"PageSize": 2})
    assert [item["Key"] for page in found for item in page["Contents"]] == sorted(keys)
    found = list(
        pages.paginate(Bucket=BUCKET, Prefix="a/", Delimiter="/", PaginationConfig={"PageSize": 3})
    )
    folders = [item["Prefix"] for page in found for item in page.get("CommonPrefixes", [])]
    assert folders == [f"a/{n}/" for n in range(7)]
    assert [item["Key"] for page in found for item in page.get("Contents", [])] == ["a/0"]
    gone = client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": k} for k in keys]})
    assert len(gone["Deleted"]) == len(keys)
    assert server.keys == {}
    assert server.counts == {"list": 8, "delete-many": 1}


def test_refusals(server: FakeS3, client: Any) -> None:
    put(server)
    server.faults = [Fault(kinds={"get"}, limit=1, skip=1, headers={"Retry-After": "1"})]
    assert ask(server, "GET", f"{ROOT}x")[0] == 200
    status, body, headers = ask(server, "GET", f"{ROOT}x")
    assert (status, headers["retry-after"]) == (503, "1")
    assert b"<Code>SlowDown</Code>" in body
    assert ask(server, "GET", f"{ROOT}x")[0] == 200
    server.faults = [Fault(status=403, code="ExpiredToken", match=f"{ROOT}x")]
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket=BUCKET, Key="x")
    assert code_of(caught.value) == "ExpiredToken"
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket="another", Key="x")
    assert code_of(caught.value) == "NoSuchBucket"


def test_a_share_of_requests(server: FakeS3) -> None:
    server.faults = [Fault(share=0.2)]
    found = [put(server, "x", b"x") for _ in range(200)]
    assert found.count(503) == server.faults[0].hits
    assert 20 <= found.count(503) <= 60


@pytest.mark.parametrize("does", ["refuse", "reset", "hang"])
@pytest.mark.parametrize("carry_out", [False, True])
def test_lost_requests_and_replies(server: FakeS3, does: Any, carry_out: bool) -> None:
    server.faults = [Fault(does=does, carry_out=carry_out, limit=1)]
    if does == "refuse":
        assert put(server, seconds=0.3) == 503
    else:
        with pytest.raises(TimeoutError if does == "hang" else ConnectionError):
            put(server, seconds=0.3)
    assert ("x" in server.keys) is carry_out
    assert put(server) == 200


def test_half_a_body(server: FakeS3) -> None:
    put(server)
    server.faults = [Fault(does="truncate", kinds={"get"})]
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ask(server, "GET", f"{ROOT}x")
    server.faults = [Fault(does="stall", kinds={"get"})]
    with pytest.raises(TimeoutError):
        ask(server, "GET", f"{ROOT}x", seconds=0.3)
    assert [one.sent for one in server.seen[1:]] == [len(DATA) // 2] * 2


def test_altered_bytes(server: FakeS3) -> None:
    put(server)
    server.faults = [Fault(does="alter")]
    found = ask(server, "GET", f"{ROOT}x")[1]
    assert [n for n in range(len(DATA)) if found[n] != DATA[n]] == [len(DATA) // 2]
    assert server.keys["x"].data == DATA
    assert put(server, "y") == 200
    assert server.keys["y"].data == found


def test_what_is_swallowed_and_what_comes_late(server: FakeS3) -> None:
    server.faults = [Fault(does="swallow", limit=1), Fault(does="keep")]
    assert put(server) == 200
    with pytest.raises(ConnectionError):
        put(server)
    assert server.keys == {}
    assert server.deliver() == [200]
    assert server.keys["x"].data == DATA


def test_conditions_that_are_ignored(server: FakeS3) -> None:
    put(server)
    server.faults = [Fault(does="answer", ignore_conditions=True, conditional=True)]
    assert put(server, data=b"second", If_None_Match="*") == 200
    assert put(server, data=b"third", If_Match='"another"') == 200
    assert put(server, data=b"fourth") == 200
    assert server.faults[0].hits == 2


def test_a_slow_server(server: FakeS3) -> None:
    put(server)
    server.latency = 0.05
    began = time.monotonic()
    ask(server, "GET", f"{ROOT}x")
    assert time.monotonic() - began >= 0.05
    server.latency, server.bytes_per_second = 0.0, len(DATA) * 10
    began = time.monotonic()
    put(server)
    ask(server, "GET", f"{ROOT}x")
    assert time.monotonic() - began >= 0.2


def test_another_clock(server: FakeS3, client: Any) -> None:
    client.put_object(Bucket=BUCKET, Key="x", Body=b"x")
    server.clock_skew = 600.0
    client.put_object(Bucket=BUCKET, Key="y", Body=b"x")
    ahead = client.head_object(Bucket=BUCKET, Key="y")["LastModified"].timestamp() - time.time()
    assert 590 < ahead < 610
    server.clock_skew = 3600.0
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=BUCKET, Key="z", Body=b"x")
    assert code_of(caught.value) == "RequestTimeTooSkewed"


def test_requests_at_the_same_time(server: FakeS3) -> None:
    put(server)
    server.forget()
    server.latency = 0.3
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, [server] * 6, ["GET"] * 6, [f"{ROOT}x"] * 6))
    assert server.peak == 6
    assert server.counts == {"get": 6}


def test_what_somebody_does_meanwhile(server: FakeS3) -> None:
    server.faults = [
        Fault(does="answer", conditional=True, meanwhile=lambda: put(server, data=b"a rival"))
    ]
    assert put(server, If_None_Match="*") == 412
    assert server.keys["x"].data == b"a rival"


def test_a_stopped_server_lets_go_of_what_hangs() -> None:
    with fake_s3() as server, ThreadPoolExecutor(1) as pool:
        server.faults = [Fault(does="hang")]
        asked = pool.submit(put, server)
        while not server.seen:
            time.sleep(0.01)
        server.stop()
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            asked.result(10)
    host, _, port = server.endpoint.removeprefix("http://").partition(":")
    with socket.socket() as line:
        assert line.connect_ex((host, int(port))) != 0


def test_the_store_sends_parts(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_streams, "PART_BYTES", 5 << 20)
    monkeypatch.setattr("dtckpt.storage.remote.fsspec.store.PART_BYTES", 5 << 20)
    data = os.urandom(11 << 20)
    store = open_store(f"s3://{BUCKET}/run", **server.storage_options)
    with store.create("x", len(data)) as stream:
        stream.write(data)
    assert names(store) == ["x"]
    assert store.read("x") == data
    assert server.counts["upload-part"] == 3
    assert server.uploads == {}
