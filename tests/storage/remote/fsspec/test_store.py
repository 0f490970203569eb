"""Stores over fsspec drivers: memory, plain files, and how bad drivers are caught."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dtckpt.errors import AccessDenied, ObjectExists, ObjectNotFound, StorageError
from dtckpt.storage import FsspecStore, ReadRequest, Store
from dtckpt.storage.remote.fsspec.dialects import BY_SCHEME
from dtckpt.storage.remote.fsspec.dialects.base import Dialect
from dtckpt.storage.remote.fsspec.uploads import upload_name

from ...conformance import DATA, Raw, StoreTests, names, write
from ...local.test_local import RawDirectory


class RawGlobal:
    """The dictionary behind memory://."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.fs = MemoryFileSystem()

    def put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def get(self, name: str) -> bytes | None:
        file = self.fs.store.get(f"{self.root}/{name}")
        return None if file is None else file.getvalue()


@pytest.fixture
def root() -> Iterator[str]:
    path = f"/{uuid.uuid4().hex}"
    yield path
    for key in [key for key in MemoryFileSystem.store if key.startswith(path)]:
        del MemoryFileSystem.store[key]


@pytest.fixture
def store(root: str) -> Store:
    return FsspecStore(f"memory:/{root}")


class TestFsspecMemory(StoreTests):
    one_winner = False

    @pytest.fixture
    def raw(self, root: str) -> Raw:
        return RawGlobal(root)

    @pytest.fixture
    def store(self, root: str) -> Store:
        return FsspecStore(f"memory:/{root}")


class TestFsspecFiles(StoreTests):
    """A file system, where uploads show while they happen: they go through a hidden name."""

    one_winner = False

    @pytest.fixture
    def raw(self, tmp_path: Path) -> Raw:
        return RawDirectory(tmp_path)

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(f"file://{tmp_path}")


class Strange(MemoryFileSystem):
    """A driver with faults that a test can switch on, over files of its own."""

    protocol = "strange"
    store: dict[str, Any] = {}  # noqa: RUF012 - the base class declares it so
    pseudo_dirs: ClassVar[list[str]] = [""]
    async_impl = False
    switches: ClassVar[dict[str, Any]] = {}
    made_with: ClassVar[dict[str, Any]] = {}

    def __init__(self, **options: Any) -> None:
        type(self).made_with = options
        self.listed: dict[str, Any] | None = None
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str) and path.startswith("strange://"):
            path = path.removeprefix("strange:/")
        return super()._strip_protocol(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed = None

    def info(self, path: str, **kwargs: Any) -> Any:
        if "info" in self.switches:
            raise self.switches["info"]
        if self.listed is None and "caches" in self.switches:
            self.listed = {key: file.size for key, file in self.store.items()}
        if self.listed is not None:
            if path not in self.listed:
                raise FileNotFoundError(path)
            return {"name": path, "type": "file", "size": self.listed[path]}
        return super().info(path, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if "steal" in self.switches:
            super().pipe_file(path, self.switches["steal"])
        if "drop" in self.switches:
            value = value[:-1]
        super().pipe_file(path, value, mode=mode, **kwargs)
        if "lost" in self.switches:
            raise self.switches["lost"]

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if "cat" in self.switches:
            raise self.switches["cat"]
        data: bytes = super().cat_file(path, start, end, **kwargs)
        return data[: len(data) - self.switches.get("short", 0)]


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The switches of a fresh ``Strange``."""
    fsspec.register_implementation("strange", Strange, clobber=True)
    switches: dict[str, Any] = {}
    monkeypatch.setattr(Strange, "switches", switches)
    monkeypatch.setattr(Strange, "store", {})
    # What s3, gs and abfs are: PUTs are atomic.
    monkeypatch.setitem(BY_SCHEME, "strange", Dialect(puts_are_atomic=True))
    return switches


@pytest.mark.parametrize("error", [FileExistsError("412"), TimeoutError("no reply"), KeyError("?")])
@pytest.mark.parametrize("overwrite", [False, True])
def test_publish_with_a_lost_reply(
    strange: dict[str, Any], error: Exception, overwrite: bool
) -> None:
    store = FsspecStore("strange://r", deadline=1)
    strange["lost"] = error
    store.publish("x", b"ours", overwrite=overwrite)
    write(store, "y", b"also ours")
    assert names(store) == ["x", "y"]


def test_publish_that_lost_the_race(strange: dict[str, Any]) -> None:
    store = FsspecStore("strange://r")
    strange["steal"] = b"them"
    with pytest.raises(ObjectExists, match="strange://r/x"):
        store.publish("x", b"ours", overwrite=False)
    assert store.read("x") == b"them"


def test_publish_of_the_same_bytes_again(store: Store) -> None:
    store.publish("x", DATA, overwrite=False)
    with pytest.raises(ObjectExists):
        store.publish("x", DATA, overwrite=False)


def test_publish_that_failed(strange: dict[str, Any]) -> None:
    store = FsspecStore("strange://r")
    strange |= {"drop": True, "lost": RuntimeError("no reply")}
    with pytest.raises(StorageError, match="no reply"):
        store.publish("x", b"ours", overwrite=False)


def test_an_upload_that_lost_bytes(strange: dict[str, Any]) -> None:
    store = FsspecStore("strange://r")
    strange["drop"] = True
    with pytest.raises(StorageError, match=r"2 bytes.*3 were written"):
        write(store, "x", b"123")


def test_listing_caches_are_not_believed(strange: dict[str, Any]) -> None:
    store, other = FsspecStore("strange://r"), FsspecStore("strange://r")
    strange["caches"] = True
    assert not store.exists("x")
    other.publish("x", b"1", overwrite=False)
    assert store.exists("x")
    other.delete(["x"])
    assert not store.exists("x")


@pytest.mark.parametrize("short", [1, 3])
def test_short_reads(strange: dict[str, Any], short: int) -> None:
    store = FsspecStore("strange://r")
    store.publish("x", b"1234", overwrite=False)
    strange["short"] = short
    with pytest.raises(StorageError, match=rf"short read .*x.* 0:4 end at {4 - short}"):
        store.read("x")
    with pytest.raises(StorageError, match=rf"short read .*x.* 0:3 end at {3 - short}"):
        store.read_into("x", [ReadRequest(0, bytearray(1)), ReadRequest(1, bytearray(2))])


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (FileNotFoundError("404"), ObjectNotFound),
        (FileExistsError("412"), ObjectExists),
        (PermissionError(13, "Forbidden"), AccessDenied),
        (RuntimeError("not an OSError"), StorageError),
    ],
)
def test_every_exception_is_mapped(
    strange: dict[str, Any], raised: Exception, expected: type[StorageError]
) -> None:
    store = FsspecStore("strange://r")
    strange["info"] = raised
    with pytest.raises(StorageError, match="cannot stat strange://r/d/x") as caught:
        store.stat("d/x")
    assert type(caught.value) is expected
    assert caught.value.__cause__ is raised
    if isinstance(raised, PermissionError):
        assert caught.value.errno == 13
    if expected is not ObjectNotFound:
        with pytest.raises(StorageError):
            store.exists("d/x")


def test_read_errors_are_mapped(strange: dict[str, Any]) -> None:
    store = FsspecStore("strange://r")
    store.publish("x", b"1234", overwrite=False)
    strange["cat"] = RuntimeError("payload broke")
    with pytest.raises(StorageError, match=r"cannot read .*payload broke"):
        store.read("x")


@pytest.mark.usefixtures("strange")
def test_options_reach_the_driver() -> None:
    given = {"token": "secret", "nested": {"a": [1]}, "use_listings_cache": True}
    store = FsspecStore("strange://r", **given)
    store.exists("x")
    assert Strange.made_with["token"] == "secret"
    assert Strange.made_with["nested"] is given["nested"]
    assert Strange.made_with["use_listings_cache"] is False
    assert "secret" not in repr(store) + store.url


def test_urls(root: str) -> None:
    assert FsspecStore(f"memory:/{root}/").url == f"memory:/{root}"
    assert FsspecStore("Memory://a").url == "memory://a"
    assert FsspecStore("ftp://me:secret@host/dir").url == "ftp://me@host/dir"
    for bad in ("memory", "s3://", "s3://b/k?versionId=1", "simplecache::memory://a"):
        with pytest.raises(ValueError, match="bad store URL"):
            FsspecStore(bad)
    with pytest.raises(StorageError, match="nonesuch"):
        FsspecStore("nonesuch://a")
    with pytest.raises(ValueError, match="versionId"):
        FsspecStore("memory://a").read("x?versionId=1")


def test_the_root_of_everything(root: str) -> None:
    store = FsspecStore("memory://")
    write(store, f"{root[1:]}/x", b"1")
    assert names(store, root[1:]) == [f"{root[1:]}/x"]
    assert names(store.substore(root[1:])) == ["x"]
    assert f"{root[1:]}/x" in names(store)


def test_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StorageError, match=r"pip install 'dtckpt\[s3\]'"):
        FsspecStore("s3://bucket/x")


def test_pickling(store: Store) -> None:
    write(store, "d/x", DATA)
    again = pickle.loads(pickle.dumps(store.substore("d")))
    assert again.read("x") == DATA
    assert again.url == f"{store.url}/d"


def test_each_process_makes_its_own_driver(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = fsspec.url_to_fs

    def logged(url: str, **options: Any) -> Any:
        made.append(url)
        return real(url, **options)

    monkeypatch.setattr(fsspec, "url_to_fs", logged)
    assert not store.exists("x")
    assert not store.exists("x")
    assert len(made) == 1
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert not store.exists("x")
    assert len(made) == 2


def test_large_reads_are_cut(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtckpt.storage.remote.ranges.FETCH_BYTES", 100)
    write(store, "x", DATA)
    buffers = [bytearray(len(DATA)), bytearray(250)]
    store.read_into("x", [ReadRequest(0, buffers[0]), ReadRequest(30, buffers[1])])
    assert buffers == [DATA, DATA[30:280]]


def test_an_upload_of_another_store_is_not_there_to_be_deleted() -> None:
    """As any object that is missing: it is no error, and nothing else goes."""
    store = FsspecStore("memory://uploads-of-others")
    write(store, "x", b"1")
    store.delete([upload_name("x", "0123")])
    assert store.read("x") == b"1"
