"""Many objects are deleted in few requests, where the server knows how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.asyn import get_loop

from dtckpt.errors import StorageError
from dtckpt.storage import Store, open_store
from dtckpt.storage.remote.asking import Connection
from dtckpt.storage.remote.fsspec.dialects.s3 import S3

from ....servers.fake_s3 import BUCKET, FakeS3, Upload, fake_s3
from ....servers.faults import Fault

NAMES = ["data/w[0:4]", "a b", "x*", "?", "gone"]


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as running:
        yield running


@pytest.fixture
def store(server: FakeS3) -> Store:
    for name in (*NAMES[:-1], "xy", "stays"):
        server.objects.put(BUCKET, f"run/{name}", b"1")
    return open_store(f"s3://{BUCKET}/run", **server.storage_options)


def test_one_request_deletes_many(server: FakeS3, store: Store) -> None:
    store.delete(NAMES)
    assert sorted(server.keys) == ["run/stays", "run/xy"]
    assert server.counts == {"delete-many": 1}


def test_a_thousand_at_a_time(server: FakeS3, store: Store) -> None:
    store.delete([f"n{number}" for number in range(2001)])
    assert server.counts == {"delete-many": 3}


@pytest.mark.parametrize(
    "status",
    [
        (501, "NotImplemented"),
        (405, "MethodNotAllowed"),
        (400, "MissingContentMD5"),
        (400, "InvalidRequest"),
        (400, "MalformedXML"),
    ],
)
def test_servers_that_delete_one_by_one(
    server: FakeS3, store: Store, status: tuple[int, str]
) -> None:
    server.faults.append(Fault(kinds=["delete-many"], status=status[0], code=status[1]))
    store.delete(NAMES)
    assert sorted(server.keys) == ["run/stays", "run/xy"]
    assert server.counts["delete"] == len(NAMES)


def test_a_refusal_is_told(server: FakeS3, store: Store) -> None:
    server.faults.append(Fault(kinds=["delete-many"], status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match=r"cannot delete .*run/data/w\[0:4\] and 4 more"):
        store.delete(NAMES)


class Answering:
    """A driver whose server answers so."""

    async_impl = True
    loop = get_loop()

    def __init__(self, errors: list[dict[str, str]]) -> None:
        self.errors = errors

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    async def _call_s3(self, method: str, **arguments: Any) -> Any:
        assert method == "delete_objects"
        return {"Errors": self.errors}


def test_uploads_of_names_that_no_store_has_are_left_alone(server: FakeS3, store: Store) -> None:
    for name in ("run//x", "run/y"):
        server.uploads[name] = Upload(BUCKET, name, 0.0)
    store = open_store(f"s3://{BUCKET}/run", **server.storage_options)
    store.delete(list(store.leftovers()))
    assert list(server.uploads) == ["run//x"]


def test_what_the_server_says_of_one_object_is_told() -> None:
    denied = {"Key": "x", "Code": "AccessDenied", "Message": "no"}
    with pytest.raises(StorageError, match="x: AccessDenied: no"):
        S3().remove_many(Connection(Answering([denied]), 5), ["b/x", "b/y"], "x")
    gone = Answering([{"Key": "x", "Code": "NoSuchKey"}])
    assert S3().remove_many(Connection(gone, 5), ["b/x", "b/y"], "x")
