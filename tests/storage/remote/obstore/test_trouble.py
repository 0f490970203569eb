"""The obstore engine on a server that makes trouble: right, or a clear error and nothing left."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageTimeout,
)
from dtckpt.storage import FsspecStore, ObstoreStore, ReadRequest, Store, open_store
from dtckpt.storage.remote import asking
from dtckpt.storage.remote.limit import limit_of
from dtckpt.storage.remote.obstore import connection, reads, uploads
from dtckpt.storage.remote.obstore.failures import explained
from dtckpt.storage.remote.trouble import PASSING, Told
from tests.servers.fake_s3 import BUCKET, FakeS3, fake_s3
from tests.servers.faults import Fault, Kind

from ...conformance import DATA, names, write

URL = f"s3://{BUCKET}/run"
MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


@pytest.fixture
def store(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("dtckpt.storage.remote.asking._FIRST_PAUSE", 0.001)
    pause = timedelta(milliseconds=10)
    backoff = {"init_backoff": pause, "max_backoff": pause, "base": 2}
    monkeypatch.setattr("dtckpt.storage.remote.obstore.connection._UPLOAD_BACKOFF", backoff)
    return ObstoreStore(URL, **server.storage_options)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """The least that S3 allows."""

    def least(_: int) -> int:
        return 5 * MIB

    monkeypatch.setattr(uploads, "part_bytes", least)
    return 5 * MIB


def keys(server: FakeS3) -> dict[str, bytes]:
    return {name.removeprefix("run/"): found.data for name, found in server.keys.items()}


def test_a_lost_reply_is_looked_up(store: Store, server: FakeS3) -> None:
    for does in ("refuse", "reset"):
        server.faults[:] = [Fault(does=does, kinds=["put"], carry_out=True, limit=1)]
        store.publish(f"made-{does}", b"ours", overwrite=False)
        store.publish(f"other-{does}", b"old", overwrite=True)
        server.faults[:] = [Fault(does=does, kinds=["put"], carry_out=True, limit=1)]
        store.replace(f"other-{does}", b"ours", expected=b"old")
    assert set(keys(server).values()) == {b"ours"}


def test_who_lost_the_race_is_told(store: Store, server: FakeS3) -> None:
    def steal() -> None:
        server.objects.put(BUCKET, "run/x", b"them")

    server.faults[:] = [Fault(does="answer", kinds=["put"], limit=1, meanwhile=steal)]
    with pytest.raises(ObjectExists, match=f"{URL}/x") as caught:
        store.publish("x", b"ours", overwrite=False)
    assert caught.value.is_certain

    def steal_again() -> None:
        server.objects.put(BUCKET, "run/x", b"they")

    server.faults[:] = [Fault(does="answer", kinds=["put"], limit=1, meanwhile=steal_again)]
    with pytest.raises(ObjectExists, match="not the one to be replaced"):
        store.replace("x", b"ours", expected=b"them")
    assert keys(server) == {"x": b"they"}


@pytest.mark.parametrize(
    ("fault", "certain"),
    [
        (Fault(status=403, code="AccessDenied"), True),
        (Fault(status=503, code="SlowDown"), False),
        (Fault(does="reset"), False),
        (Fault(does="reset", carry_out=True, ignore_conditions=True), None),
    ],
)
def test_what_is_known_after_a_failure(server: FakeS3, fault: Fault, certain: bool | None) -> None:
    store = ObstoreStore(URL, **server.storage_options, deadline=0.5)
    fault.kinds = ["put"]
    server.faults[:] = [fault]
    if certain is None:
        store.publish("x", b"ours", overwrite=False)
        return
    with pytest.raises(StorageError, match=r"cannot write s3://.*/x") as caught:
        store.publish("x", b"ours", overwrite=False)
    assert caught.value.is_certain is certain
    assert caught.value.__cause__ is not None


def test_a_failure_to_look_has_its_own_cause(store: Store, server: FakeS3) -> None:
    stream = store.create("x", 3)
    stream.write(b"abc")
    server.faults[:] = [Fault(status=403, kinds=["head"])]
    with pytest.raises(AccessDenied) as caught:
        stream.close()
    assert caught.value.__cause__ is not caught.value


def test_conflicts_and_busy_servers_are_asked_again(store: Store, server: FakeS3) -> None:
    server.faults[:] = [
        Fault(status=409, code="ConditionalRequestConflict", kinds=["put"], limit=2),
        Fault(kinds=["get", "head", "list", "delete-many"], limit=8, share=0.5),
        Fault(does="truncate", kinds=["get", "list"], limit=3, share=0.5),
    ]
    store.publish("x", DATA, overwrite=False)
    assert store.read("x") == DATA
    assert store.read("x", 7, 100) == DATA[7:100]
    assert names(store) == ["x"]
    store.delete(["x"])
    assert keys(server) == {}


def test_servers_without_conditions(store: Store, server: FakeS3) -> None:
    server.faults[:] = [Fault(status=501, code="NotImplemented", conditional=True)]
    store.publish("x", b"one", overwrite=False)
    store.replace("x", b"two", expected=b"one")
    assert keys(server) == {"x": b"two"}


def test_a_server_that_is_silent(server: FakeS3) -> None:
    server.faults[:] = [Fault(does="hang")]
    store = ObstoreStore(URL, **server.storage_options, deadline=0.5)
    with pytest.raises(StorageTimeout, match=r"cannot stat .*given up after .*attempts: 2"):
        store.exists("x")


def test_nothing_is_told_as_missing_that_could_not_be_seen(store: Store, server: FakeS3) -> None:
    server.faults[:] = [Fault(status=403, code="AccessDenied")]
    for call in (lambda: list(store.list()), store.level, lambda: store.exists("x")):
        with pytest.raises(StorageError, match=r"cannot (list|read)") as caught:
            call()
        assert isinstance(caught.value, AccessDenied)
    server.faults.clear()
    nowhere = ObstoreStore("s3://no-such-bucket/x", **server.storage_options)
    for call in (
        lambda: list(nowhere.list()),
        nowhere.level,
        lambda: nowhere.publish("y", b"1", overwrite=True),
    ):
        with pytest.raises(StorageError, match=r"bucket .*exist") as caught:
            call()
        assert not isinstance(caught.value, ObjectNotFound)
    with pytest.raises(StorageError, match=r"cannot stat .*: ") as caught:
        ObstoreStore("s3://b/x", endpoint_url="http://127.0.0.1:1", anon=True, deadline=0.2).stat(
            "y"
        )
    assert not isinstance(caught.value, ObjectNotFound)


def test_a_host_that_hangs_up_twice_at_once_is_not_a_wrong_setting(
    server: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pauses are long here, a tenth of the deadline is over then."""

    def always(_: int, __: float) -> float:
        return 0.06

    monkeypatch.setattr(asking, "pause_after", always)
    server.faults[:] = [Fault(does="reset", limit=2)]
    assert not ObstoreStore(URL, **server.storage_options, deadline=1).exists("x")
    assert server.faults[0].hits == 2


def test_a_busy_server_is_asked_less(store: Store, server: FakeS3) -> None:
    limit = limit_of(f"s3://{BUCKET}", server.storage_options)
    before = limit.allowed
    server.faults[:] = [Fault(limit=1)]
    assert not store.exists("x")
    assert limit.allowed < before
    assert not FsspecStore(URL, **server.storage_options).exists("x")
    assert limit is limit_of(f"s3://{BUCKET}", server.obstore_options)
    assert limit is not limit_of(f"s3://{BUCKET}", {"endpoint_url": "http://127.0.0.1:1"})


def test_a_deadline_is_a_number_of_seconds(server: FakeS3) -> None:
    with pytest.raises(ValueError, match="deadline is a number of seconds"):
        ObstoreStore(URL, **server.storage_options, deadline=0)


# -- large objects


def test_parts_are_sent_at_once_but_not_too_many(
    store: Store, server: FakeS3, small_parts: int
) -> None:
    data = b"".join(bytes([number]) * small_parts for number in range(9)) + b"end"
    server.faults[:] = [Fault(does="answer", kinds=["upload-part"], seconds=0.5)]
    with store.create("x", len(data)) as stream:
        stream.write(data[: small_parts // 2])
        stream.write(data[small_parts // 2 :])
        assert names(store) == []
    assert keys(server) == {"x": data}
    assert server.counts["upload-part"] == 10
    assert 2 <= server.peak <= connection.NUM_PARTS + 1


@pytest.mark.parametrize("kind", ["begin-upload", "upload-part", "complete-upload"])
@pytest.mark.parametrize("does", ["refuse", "reset"])
@pytest.mark.usefixtures("small_parts")
def test_uploads_pass_over_trouble(store: Store, server: FakeS3, kind: Any, does: Any) -> None:
    server.faults[:] = [Fault(does=does, kinds=[kind], limit=2)]
    write(store, "x", bytes(11 * MIB))
    assert keys(server) == {"x": bytes(11 * MIB)}
    assert not server.uploads


@pytest.mark.usefixtures("small_parts")
def test_an_upload_to_google_is_begun_again() -> None:
    """obstore does not, after silence."""
    from tests.servers.fake_gcs import FakeGcs

    with FakeGcs() as server:
        store = ObstoreStore(f"gs://{BUCKET}/run", **server.obstore_options, deadline=3.0)
        server.faults[:] = [Fault(does="hang", kinds=["begin-upload"], limit=1)]
        write(store, "x", bytes(11 * MIB))
        assert keys(server) == {"x": bytes(11 * MIB)}
        server.faults[:] = [Fault(does="hang", kinds=["begin-upload"])]
        with pytest.raises(StorageTimeout, match=r"y: .* attempts: [23]"):
            write(store, "y", bytes(11 * MIB))
        assert set(keys(server)) == {"x"}


@pytest.mark.usefixtures("small_parts")
def test_an_upload_whose_completion_was_not_confirmed(store: Store, server: FakeS3) -> None:
    server.faults[:] = [Fault(does="reset", kinds=["complete-upload"], carry_out=True, limit=1)]
    write(store, "x", bytes(11 * MIB))
    assert keys(server) == {"x": bytes(11 * MIB)}


@pytest.mark.parametrize("kind", ["begin-upload", "upload-part", "complete-upload"])
@pytest.mark.usefixtures("small_parts")
def test_uploads_that_are_refused_leave_nothing(store: Store, server: FakeS3, kind: Any) -> None:
    server.faults[:] = [Fault(status=403, code="AccessDenied", kinds=[kind], skip=0)]
    with pytest.raises(StorageError, match=r"cannot write s3://.*/x: .*AccessDenied"):
        write(store, "x", bytes(40 * MIB))
    assert keys(server) == {}
    assert not server.uploads


@pytest.mark.usefixtures("small_parts")
def test_streams_that_end_early(store: Store, server: FakeS3) -> None:
    stream = store.create("aborted", 12 * MIB)
    stream.write(bytes(11 * MIB))
    stream.abort()
    stream = store.create("dropped", 12 * MIB)
    stream.write(bytes(11 * MIB))
    del stream
    gc.collect()
    with pytest.raises(StorageError, match="announced"), store.create("short", 12 * MIB) as stream:
        stream.write(bytes(11 * MIB))
    assert keys(server) == {}
    assert not server.uploads
    with store.create("shorter", 12 * MIB) as stream:
        stream.write(bytes(11 * MIB))
        stream.shorten()
    with store.create("tiny", 12 * MIB) as stream:
        stream.write(b"123")
        stream.shorten()
    assert keys(server) == {"shorter": bytes(11 * MIB), "tiny": b"123"}


def test_uploads_without_threads(
    store: Store, server: FakeS3, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: Any) -> None:
        if thread.name in ("dtckpt-upload", "dtckpt-fetch"):  # the server needs its own
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    data = os.urandom(MIB) * 40
    write(store, "x", data)
    assert keys(server) == {"x": data}
    assert store.read("x") == data
    stream = store.create("y", 2 * small_parts)
    stream.write(bytes(2 * small_parts))
    stream.abort()
    assert set(keys(server)) == {"x"}


KILLED = """
import os, sys, json, time
from dtckpt.storage import open_store
store = open_store(sys.argv[1], engine="obstore", **json.loads(sys.argv[2]))
stream = store.create("d/x", 100 << 20)
stream.write(bytes(80 << 20))
os.kill(os.getpid(), 9)
"""


def test_uploads_of_killed_processes_are_collected(store: Store, server: FakeS3) -> None:
    options = json.dumps(server.storage_options)
    killed = subprocess.run([sys.executable, "-c", KILLED, URL, options], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(server.uploads) == 1
    (left,) = store.leftovers()
    assert left.startswith("d/x?uploadId=")
    assert list(store.substore("d").leftovers()) == [left.removeprefix("d/")]
    assert list(store.leftovers("other")) == []
    store.publish("d/y", b"1", overwrite=False)
    store.substore("d").delete([left.removeprefix("d/"), "y"])
    assert not server.uploads
    assert not server.keys
    words_of_obstore = ObstoreStore(URL, endpoint=server.endpoint, region="x", anon=True)
    assert list(words_of_obstore.leftovers()) == []
    with pytest.raises(StorageError, match="cannot end uploads"):
        words_of_obstore.delete([left])


# -- reading


def test_ranges_are_read_at_once_and_as_they_come(store: Store, server: FakeS3) -> None:
    data = os.urandom(MIB) * 100
    server.objects.put(BUCKET, "run/x", data)
    server.faults[:] = [Fault(does="answer", kinds=["get"], seconds=0.1)]
    buffers = [bytearray(4 * MIB) for _ in range(25)]
    requests = [ReadRequest(i * 4 * MIB, buffer) for i, buffer in enumerate(buffers)]
    seen: list[int] = []
    for request in store.read_each("x", requests):
        assert request.view == data[request.offset : request.stop]
        seen.append(request.offset)
    assert sorted(seen) == [request.offset for request in requests]
    assert server.counts["get"] == 7  # 16 MiB each
    assert 2 <= server.peak <= reads.NUM_FETCHES


def test_an_iterator_that_is_closed_stops_reading(store: Store, server: FakeS3) -> None:
    server.objects.put(BUCKET, "run/x", bytes(64 * MIB))
    requests = [ReadRequest(i * 16 * MIB, bytearray(16 * MIB)) for i in range(4)]
    found = store.read_each("x", requests)
    first = next(iter(found))
    found.close()  # pyright: ignore[reportAttributeAccessIssue]
    first.view[:] = b"\1" * len(first.view)
    assert set(bytes(first.view)) == {1}


@pytest.mark.parametrize(
    "text",
    [
        "Wanted range starting at 7, but object was only 7 bytes long; InvalidRangeRequest {",
        "Failed to parse value for CONTENT_RANGE header",
    ],
)
def test_a_reply_of_another_range_is_not_asked_for_again(text: str) -> None:
    from obstore.exceptions import GenericError

    with pytest.raises(Told) as caught, explained():
        raise GenericError(f"Generic MicrosoftAzure error: {text}")
    assert caught.value.trouble.kind not in PASSING


def test_a_range_that_fails(store: Store, server: FakeS3) -> None:
    server.objects.put(BUCKET, "run/x", bytes(64 * MIB))
    server.faults[:] = [Fault(status=403, code="AccessDenied", kinds=["get"], skip=2)]
    buffer = bytearray(64 * MIB)
    with pytest.raises(StorageError, match=r"cannot read .*/x: AccessDenied"):
        store.read_into("x", [ReadRequest(0, buffer)])


# -- processes


def test_pickling_and_other_processes(store: Store) -> None:
    write(store, "d/x", DATA)
    again = pickle.loads(pickle.dumps(store.substore("d")))
    assert again.read("x") == DATA
    assert again.url == f"{URL}/d"


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told(store: Store) -> None:
    assert not store.exists("x")  # obstore's threads run from here on
    pid = os.fork()
    if pid == 0:
        gc.freeze()
        signal.alarm(30)  # die rather than hang
        try:
            store.exists("x")
        except StorageError as error:
            os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


AT_EXIT = """
import atexit, sys, json
from dtckpt.storage import open_store
store = open_store(sys.argv[1], engine="obstore", **json.loads(sys.argv[2]))

@atexit.register
def write():
    with store.create("x", 33 << 20) as stream:
        stream.write(bytes(33 << 20))
"""


def test_an_upload_while_the_interpreter_ends(server: FakeS3) -> None:
    options = json.dumps(server.storage_options)
    subprocess.run([sys.executable, "-c", AT_EXIT, URL, options], check=True, timeout=120)
    assert keys(server) == {"x": bytes(33 << 20)}


def test_checkpoints_by_either_engine_are_the_same(server: FakeS3) -> None:
    fsspec, obstore = server.storage_options, {**server.storage_options, "engine": "obstore"}
    for number, (written, read) in enumerate(((fsspec, obstore), (obstore, fsspec))):
        url = f"{URL}/step-{number}"
        ckpt.save({"step": 3, "lr": 0.5}, url, storage_options=written)
        state = {"step": 0, "lr": 0.0}
        ckpt.load(state, url, storage_options=read)
        assert state == {"step": 3, "lr": 0.5}
    found = ckpt.committed_steps(URL, storage_options=obstore)
    assert len(found) == len(ckpt.committed_steps(URL, storage_options=fsspec))
    assert open_store(URL, **obstore).url == open_store(URL, **fsspec).url


@pytest.mark.usefixtures("small_parts", "store")
def test_checkpoints_on_a_busy_server(server: FakeS3) -> None:
    options = {**server.storage_options, "engine": "obstore"}
    state = {f"t{number}": torch.randn(512, 1024) for number in range(20)}
    server.faults[:] = [Fault(share=0.2)]
    ckpt.save({"model": state}, f"{URL}/step-1", storage_options=options)
    assert server.faults[0].hits > 3
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ckpt.load({"model": loaded}, f"{URL}/step-1", storage_options=options)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert not server.uploads
    server.faults.clear()
    assert not ckpt.verify(f"{URL}/step-1", storage_options=options).problems


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_what_came_after_a_removal_whose_reply_was_lost_stays(
    server: FakeS3, store: Store, engine: str
) -> None:
    def save() -> None:
        if removals.hits:
            server.objects.put(BUCKET, "run/x", b"new")

    store = open_store(URL, **server.storage_options, engine=engine)
    server.objects.put(BUCKET, "run/x", b"old")
    kinds: list[Kind] = ["delete", "delete-many"]
    removals = Fault(kinds=kinds, status=500, code="InternalError", carry_out=True, limit=1)
    others = Fault(
        kinds=[*kinds, "get", "head"], does="answer", meanwhile=save, ignore_conditions=True
    )
    server.faults[:] = [removals, others]
    with pytest.raises(ObjectExists):
        store.remove("x", expected=b"old")
    assert server.keys["run/x"].data == b"new"
