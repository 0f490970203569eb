"""Long listings: each page has the deadline for itself, and none is lost or told twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fsspec.asyn import get_loop

from dtckpt.errors import StorageTimeout
from dtckpt.storage import Store, open_store
from dtckpt.storage.remote.asking import Connection
from dtckpt.storage.remote.fsspec.dialects.az import Az
from tests.servers.fake_s3 import BUCKET, FakeS3, fake_s3
from tests.servers.faults import Fault

NAMES = [f"{number:06}" for number in range(6500)]
DEADLINE = 2.0


@pytest.fixture
def server() -> Iterator[FakeS3]:
    pytest.importorskip("s3fs")
    with fake_s3() as server:
        for name in NAMES:
            server.objects.put(BUCKET, f"run/{name}", b"1")
        yield server


@pytest.fixture(params=["fsspec", "obstore"])
def store(server: FakeS3, request: pytest.FixtureRequest) -> Store:
    if request.param == "obstore":
        pytest.importorskip("obstore")
    options = server.storage_options | {"deadline": DEADLINE, "engine": request.param}
    return open_store(f"s3://{BUCKET}/run", **options)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(does="answer", kinds=["list"], seconds=0.35),
        Fault(status=500, code="InternalError", kinds=["list"], skip=2, limit=1),
        Fault(does="truncate", kinds=["list"], skip=2, limit=1),
    ],
    ids=["slow", "refused", "broken off"],
)
def test_pages(server: FakeS3, store: Store, fault: Fault) -> None:
    fault.passed = fault.hits = 0
    server.faults = [fault]
    assert [info.name for info in store.list()] == NAMES
    assert fault.hits


class Blob(dict[str, Any]):
    """What is told of one."""

    @property
    def name(self) -> str:
        return self["name"]


@pytest.mark.parametrize(("seconds", "is_in_time"), [(0.25, True), (9.0, False)])
def test_pages_of_azure(seconds: float, *, is_in_time: bool) -> None:
    class Paged:
        def __init__(self, after: str | None) -> None:
            self.at = int(after or 0)
            self.continuation_token: str | None = after

        def __aiter__(self) -> Paged:
            return self

        async def __anext__(self) -> Any:
            if self.at == 5:
                raise StopAsyncIteration
            await asyncio.sleep(seconds)
            self.at += 1
            self.continuation_token = None if self.at == 5 else str(self.at)
            return self.one(self.at)

        async def one(self, number: int) -> AsyncIterator[Blob]:
            yield Blob(name=f"run/{number}", size=number)

    class Client:
        def get_container_client(self, _: str) -> Any:
            return self

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        def list_blobs(self, **_: Any) -> Any:
            return self

        def by_page(self, continuation_token: str | None) -> Any:
            return Paged(continuation_token)

    class Driver:
        async_impl = True
        loop = get_loop()
        service_client = Client()

        def split_path(self, path: str) -> tuple[str, str, None]:
            container, _, key = path.partition("/")
            return container, key, None

    connection = Connection(Driver(), deadline=1.0)
    if not is_in_time:
        with pytest.raises(StorageTimeout):
            Az().listing(connection, "c/run", "c/run", deep=True)
        return
    found = Az().listing(connection, "c/run", "c/run", deep=True)
    assert {path: info["size"] for path, info in found.items()} == {
        f"c/run/{number}": number for number in range(1, 6)
    }
