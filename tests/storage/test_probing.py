"""What stores are seen to do, and that nothing is left of the look."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage import Capabilities, MemoryStore, Store, capabilities, open_store, probing
from tests.servers.fake_s3 import BUCKET, FakeS3, fake_s3
from tests.servers.faults import Fault, Kind


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_found", {})


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


def told(found: Capabilities) -> dict[str, bool | None]:
    """What is known but for the times."""
    times = ("url", "latency", "clock_skew")
    return {name: getattr(found, name) for name in found.__slots__ if name not in times}


ALL = {
    "conditional_create": True,
    "conditional_replace": True,
    "conditional_remove": True,
    "atomic_visibility": True,
    "consistent_listing": True,
    "tells_unfinished": True,
    "refuses_past_the_end": True,
}


def test_local(tmp_path: Path) -> None:
    found = capabilities(tmp_path / "a" / "b")
    assert told(found) == ALL
    assert found.url == str(tmp_path / "a" / "b")
    assert 0 < found.latency < 60
    assert found.clock_skew is not None
    assert abs(found.clock_skew) < 60
    assert list(tmp_path.iterdir()) == []


# Newer Pythons warn of what is tested here: a fork beside threads.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_probes(tmp_path: Path) -> None:
    with vars(probing)["_one_at_a_time"]:
        pid = os.fork()
        if pid == 0:
            gc.freeze()
            signal.alarm(20)  # die rather than hang
            try:
                capabilities(tmp_path, write=False)
                os._exit(0)
            except BaseException:
                os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_others_have_put_there_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    store.publish("x/y", b"1", overwrite=False)
    capabilities(tmp_path / "run")
    assert [info.name for info in store.list()] == ["x/y"]
    assert os.listdir(tmp_path / "run") == ["x"]


def test_memory() -> None:
    objects: dict[str, bytes] = {}
    assert told(capabilities(MemoryStore(objects))) == ALL | {"tells_unfinished": False}
    assert objects == {}


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_object_stores(server: FakeS3, engine: str) -> None:
    options: dict[str, Any] = {**server.storage_options, "engine": engine}
    found = capabilities(f"s3://{BUCKET}/run", **options)
    assert told(found) == ALL | {"conditional_remove": engine == "fsspec"}
    assert not server.keys
    assert not server.uploads


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_servers_that_ignore_conditions(server: FakeS3, engine: str) -> None:
    server.faults[:] = [
        Fault(does="answer", conditional=True, ignore_conditions=True, seconds=0.02)
    ]
    options: dict[str, Any] = {**server.storage_options, "engine": engine}
    found = told(capabilities(f"s3://{BUCKET}/run", **options))
    names = ("conditional_create", "conditional_replace", "conditional_remove")
    assert [found[name] for name in names] == [False] * 3
    assert not server.keys


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (403, "AccessDenied")])
def test_servers_that_do_not_list_uploads(
    server: FakeS3, engine: str, status: int, code: str
) -> None:
    server.faults[:] = [Fault(status=status, code=code, kinds=["list-uploads"])]
    options: dict[str, Any] = {**server.storage_options, "engine": engine, "deadline": 2}
    found = told(capabilities(f"s3://{BUCKET}/run", **options))
    expected = {"conditional_remove": engine == "fsspec", "tells_unfinished": None}
    assert found == ALL | expected
    assert not server.keys
    assert not server.uploads


def test_stores_that_are_only_read(server: FakeS3) -> None:
    kinds: list[Kind] = ["put", "delete", "delete-many", "begin-upload"]
    server.faults[:] = [Fault(status=403, code="AccessDenied", kinds=kinds)]
    url = f"s3://{BUCKET}/run"
    options: dict[str, Any] = {**server.storage_options, "engine": "obstore"}
    with pytest.raises(StorageError, match="AccessDenied"):
        capabilities(url, **options)
    before = server.counts
    found = capabilities(url, write=False, **options)
    assert set(told(found).values()) == {None}
    assert found.latency > 0
    assert set(server.counts - before) == {"head"}


class Counting(MemoryStore):  # pyright: ignore[reportGeneralTypeIssues]
    """Counts how often it is asked to begin something."""

    asked = 0

    def create(self, name: str, size: int) -> Any:
        Counting.asked += 1
        return super().create(name, size)

    def substore(self, prefix: str) -> Store:
        other = Counting(self._objects)
        other._prefix = prefix
        return other


def test_a_store_is_asked_once() -> None:
    store = Counting()
    assert capabilities(store, write=False).conditional_create is None
    Counting.asked = 0
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(capabilities, [store] * 4))
    assert len(found) == 1
    assert Counting.asked == 3
    assert capabilities(store, write=False) in found


def test_all_of_a_bucket_are_one(server: FakeS3) -> None:
    options: dict[str, Any] = {**server.storage_options, "engine": "obstore"}
    first = capabilities(f"s3://{BUCKET}/run/step-1", **options)
    before = server.counts
    second = capabilities(f"s3://{BUCKET}/other", **options)
    assert server.counts == before
    assert second.url == f"s3://{BUCKET}/other"
    assert told(first) == told(second)


def test_stores_of_one_url_are_not_taken_for_each_other(server: FakeS3) -> None:
    def opened(running: FakeS3) -> Store:
        return open_store(f"s3://{BUCKET}/run", **running.storage_options)

    with fake_s3() as other:
        other.faults[:] = [Fault(does="answer", conditional=True, ignore_conditions=True)]
        assert capabilities(opened(server)).conditional_create is True
        assert capabilities(opened(other)).conditional_create is False
        assert capabilities(opened(server)).conditional_create is True


class Careless(MemoryStore):  # pyright: ignore[reportGeneralTypeIssues]
    """Compares, then writes; its listings are late; it shows what is not complete."""

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        assert self.read(name) == expected
        time.sleep(0.05)
        self.publish(name, data, overwrite=True)

    def list(self, prefix: str = "") -> Iterator[Any]:
        return iter(())

    def create(self, name: str, size: int) -> Any:
        made = super().create(name, size)
        self.publish(name, b"", overwrite=True)
        return made

    def substore(self, prefix: str) -> Store:
        return self


def test_careless_stores() -> None:
    found = told(capabilities(Careless()))
    assert found["conditional_replace"] is False
    assert found["consistent_listing"] is False
    assert found["atomic_visibility"] is False
