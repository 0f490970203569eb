"""The fsspec store on S3: a real server on loopback, real uploads in parts."""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import s3fs

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError
from dtckpt.storage import FsspecStore, Store, open_store
from dtckpt.storage.remote.fsspec import streams as fsspec_streams
from dtckpt.storage.remote.fsspec.dialects.s3 import S3Upload

from ....conftest import BUCKET, S3
from ...conformance import DATA, Raw, StoreTests, names, write

NUM_PARTS = S3Upload.num_in_flight


class RawBucket:
    def __init__(self, s3: S3) -> None:
        self.s3 = s3

    def put(self, name: str, data: bytes) -> None:
        self.s3.client.put_object(Bucket=BUCKET, Key=self.s3.key(name), Body=data)

    def get(self, name: str) -> bytes | None:
        try:
            reply = self.s3.client.get_object(Bucket=BUCKET, Key=self.s3.key(name))
        except self.s3.client.exceptions.NoSuchKey:
            return None
        return reply["Body"].read()

    def uploads(self) -> list[str]:
        """Keys of unfinished uploads in parts."""
        found = self.s3.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [upload["Key"] for upload in found if upload["Key"].startswith(self.s3.key(""))]


@pytest.fixture
def raw(s3: S3) -> RawBucket:
    return RawBucket(s3)


@pytest.fixture
def store(s3: S3) -> Store:
    return s3.store


class TestS3(StoreTests):
    num_races = 1

    @pytest.fixture
    def raw(self, s3: S3) -> Raw:
        return RawBucket(s3)

    @pytest.fixture
    def store(self, s3: S3) -> Store:
        return s3.store


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """The least that S3 allows."""
    monkeypatch.setattr(fsspec_streams, "PART_BYTES", 5 << 20)
    monkeypatch.setattr("dtckpt.storage.remote.fsspec.store.PART_BYTES", 5 << 20)
    return 5 << 20


def test_upload_in_parts(store: Store, raw: RawBucket, small_parts: int) -> None:
    data = os.urandom(1 << 20) * 11
    with store.create("x", len(data)) as stream:
        stream.write(data[:3])
        stream.write(memoryview(data)[3:])
        assert len(raw.uploads()) == 1
        assert names(store) == []
    assert len(data) > 2 * small_parts
    assert raw.get("x") == data
    assert raw.uploads() == []


@pytest.mark.usefixtures("small_parts")
def test_aborted_upload(store: Store, raw: RawBucket) -> None:
    stream = store.create("x", 7 << 20)
    stream.write(bytes(6 << 20))
    assert len(raw.uploads()) == 1
    stream.abort()
    assert (raw.uploads(), raw.get("x")) == ([], None)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("num_mib", [1, 6])
def test_dropped_upload(store: Store, raw: RawBucket, num_mib: int) -> None:
    stream = store.create("x", 7 << 20)
    stream.write(bytes(num_mib << 20))
    del stream
    assert (raw.uploads(), raw.get("x")) == ([], None)


@pytest.mark.usefixtures("small_parts")
def test_short_upload(store: Store, raw: RawBucket) -> None:
    stream = store.create("x", 7 << 20)
    stream.write(bytes(6 << 20))
    with pytest.raises(StorageError, match="announced"):
        stream.close()
    assert (raw.uploads(), raw.get("x")) == ([], None)


@pytest.mark.usefixtures("small_parts")
def test_upload_that_the_server_forgot(raw: RawBucket, s3: S3) -> None:
    # The server breaks down over it.
    stream = FsspecStore(s3.url, **s3.options, deadline=3).create("x", 7 << 20)
    stream.write(bytes(7 << 20))
    found = s3.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    (upload,) = [upload for upload in found if upload["Key"].startswith(s3.key(""))]
    s3.client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    with pytest.raises(StorageError, match=r"cannot (write|complete)"):
        stream.close()
    assert raw.get("x") is None


class Calls:
    """Every call that s3fs makes for a stream, seen and if need be replaced before it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.Lock()
        self.in_flight = self.most = self.parts = 0
        self.before: Callable[[int], object] = lambda _: None
        """Called with the number of a part that is about to be sent."""
        real: Any = vars(s3fs.S3FileSystem)["_call_s3"]
        calls = self

        async def watched(fs: Any, method: str, *given: Any, **arguments: Any) -> Any:
            if method != "upload_part":
                return await real(fs, method, *given, **arguments)
            with calls.lock:
                calls.parts += 1
                calls.in_flight += 1
                calls.most = max(calls.most, calls.in_flight)
            try:
                await asyncio.to_thread(calls.before, arguments["PartNumber"])
                return await real(fs, method, *given, **arguments)
            finally:
                with calls.lock:
                    calls.in_flight -= 1

        monkeypatch.setattr("s3fs.S3FileSystem._call_s3", watched)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_parts_are_sent_at_once_but_not_too_many(
    store: Store, raw: RawBucket, small_parts: int, calls: Calls
) -> None:
    together = threading.Barrier(NUM_PARTS)

    def meet(number: int) -> None:
        if number <= NUM_PARTS:
            together.wait(timeout=60)  # nobody passes unless all are on their way

    calls.before = meet
    data = b"".join(bytes([number]) * small_parts for number in range(NUM_PARTS + 2)) + b"end"
    write(store, "x", data)
    assert (calls.parts, calls.most) == (NUM_PARTS + 3, NUM_PARTS)
    assert raw.get("x") == data
    assert raw.uploads() == []


@pytest.mark.parametrize("broken", [1, 3])
def test_a_part_that_fails(
    store: Store, raw: RawBucket, small_parts: int, calls: Calls, broken: int
) -> None:
    def fail(number: int) -> None:
        if number == broken:
            raise OSError("the line is dead")

    calls.before = fail
    with pytest.raises(StorageError, match=r"cannot (write|complete) .*/x: .*the line is dead"):
        write(store, "x", bytes(3 * small_parts))
    assert (raw.uploads(), raw.get("x")) == ([], None)


def test_a_part_that_fails_stops_the_writer(
    store: Store, raw: RawBucket, small_parts: int, calls: Calls
) -> None:
    def fail(number: int) -> None:
        raise OSError(f"part {number} is lost")

    calls.before = fail

    def write_on() -> None:
        with store.create("x", 100 * small_parts) as stream:
            for _ in range(100):
                stream.write(bytes(small_parts))

    with pytest.raises(StorageError, match=r"cannot write .*/x: .*part \d is lost"):
        write_on()
    assert calls.parts <= NUM_PARTS
    assert (raw.uploads(), raw.get("x")) == ([], None)


def test_parts_without_threads(
    store: Store, raw: RawBucket, small_parts: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dtckpt-part":  # the server needs its own
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    write(store, "x", bytes(2 * small_parts))
    assert (calls.parts, calls.most) == (2, 1)
    assert raw.get("x") == bytes(2 * small_parts)


AT_EXIT = """
import atexit, json, sys
from dtckpt.storage import open_store
url, options = sys.argv[1], json.loads(sys.argv[2])
store = open_store(url, **options)
store.exists("x")

@atexit.register
def write():
    with store.create("x", 33 << 20) as stream:
        stream.write(bytes(33 << 20))
"""


def test_an_upload_while_the_interpreter_ends(s3: S3) -> None:
    options = json.dumps(s3.options)
    subprocess.run([sys.executable, "-c", AT_EXIT, s3.url, options], check=True, timeout=120)
    assert s3.store.stat("x").size == 33 << 20


def test_store_of_its_own(raw: RawBucket, s3: S3) -> None:
    with open_store(f"{s3.url}/", **s3.options) as store:
        assert store.url == s3.url
        write(store, "d/x", DATA)
    assert raw.get("d/x") == DATA


def test_part_sizes() -> None:
    mib = 1 << 20
    assert fsspec_streams.part_bytes(1) == fsspec_streams.part_bytes(1000 * mib) == 16 * mib
    huge = 5 << 40
    assert huge / fsspec_streams.part_bytes(huge) <= 10_000
    assert fsspec_streams.part_bytes(huge) % mib == 0


def test_errors_of_the_server(s3: S3) -> None:
    nowhere = FsspecStore("s3://no-such-bucket-here/x", **s3.options)
    for ask in (
        lambda: nowhere.read("y", 0, 1),
        lambda: list(nowhere.list()),
        lambda: nowhere.level(),
        lambda: nowhere.publish("y", b"1", overwrite=True),
    ):
        with pytest.raises(StorageError, match=r"no-such-bucket-here/x.*make it, or") as caught:
            ask()
        assert not isinstance(caught.value, ObjectNotFound)


def test_unreachable_server() -> None:
    options: dict[str, Any] = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:1", "region_name": "us-east-1"},
    }
    store = FsspecStore("s3://bucket/x", **options, deadline=3)
    with pytest.raises(StorageError, match=r"cannot stat s3://bucket/x/y.*check the endpoint"):
        store.exists("y")


def test_forced_and_given_settings(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    real = fsspec.url_to_fs

    def logged(url: str, **options: Any) -> Any:
        seen.append(copy.deepcopy(options))
        return real(url, **options)

    monkeypatch.setattr(fsspec, "url_to_fs", logged)
    given = {"max_pool_connections": 5, "retries": {"max_attempts": 3}}
    FsspecStore(s3.url, **s3.options, deadline=40).exists("x")
    FsspecStore(s3.url, **s3.options, config_kwargs=given).exists("x")
    forced = {"use_listings_cache": False, "skip_instance_cache": True}
    ours = {
        "max_pool_connections": 32,
        "connect_timeout": 10.0,
        "read_timeout": 10.0,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    patience = {"connect_timeout": 30.0, "read_timeout": 30.0}
    assert seen == [
        s3.options | forced | {"config_kwargs": ours},
        s3.options | forced | {"config_kwargs": patience | given},
    ]
    assert given == {"max_pool_connections": 5, "retries": {"max_attempts": 3}}


def test_other_writers_are_seen_at_once(store: Store, raw: RawBucket, s3: S3) -> None:
    assert names(store) == []
    assert not store.exists("x")
    raw.put("x", DATA)
    assert store.exists("x")
    assert names(store) == ["x"]
    s3.client.delete_object(Bucket=BUCKET, Key=s3.key("x"))
    assert not store.exists("x")
    assert names(store) == []


def test_directory_markers_are_no_objects(store: Store, raw: RawBucket) -> None:
    raw.put("d/", b"")
    raw.put("d/x", b"1")
    assert names(store) == names(store, "d") == ["d/x"]
    assert not store.exists("d")


def test_create_is_conditional_on_the_server(store: Store, raw: RawBucket) -> None:
    stream = store.create("x", 4)
    stream.write(b"ours")
    raw.put("x", b"them")
    with pytest.raises(ObjectExists):
        stream.close()
    assert raw.get("x") == b"them"


def test_the_same_bytes_of_another_writer_are_not_taken_for_ours(
    store: Store, raw: RawBucket
) -> None:
    raw.put("x", DATA)
    with pytest.raises(ObjectExists, match="x"):
        write(store, "x", DATA)


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
# Newer Pythons warn of what is tested here: a fork beside the driver's thread.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork(store: Store) -> None:
    write(store, "x", DATA)
    pid = os.fork()
    if pid == 0:
        # Groups that other tests left as garbage join threads of the parent when they are freed.
        gc.freeze()
        faulthandler.register(signal.SIGALRM, chain=True)  # tells where
        signal.alarm(20)  # die rather than hang
        try:
            os._exit(0 if store.read("x") == DATA else 1)
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
