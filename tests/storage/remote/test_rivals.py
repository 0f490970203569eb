"""Objects that are not what their writer takes them for: another one's, or not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtckpt.errors import AccessDenied, ObjectNotFound, StorageError
from dtckpt.storage import Store, open_store
from dtckpt.storage.remote.fsspec.streams import PART_BYTES
from tests.servers.fake_gcs import fake_gcs
from tests.servers.fake_s3 import BUCKET, FakeS3, fake_s3
from tests.servers.faults import Fault, Kind

from ..conformance import write

SIZE = PART_BYTES + 1


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


@pytest.fixture(params=["fsspec", "obstore"])
def store(server: FakeS3, request: pytest.FixtureRequest) -> Store:
    if request.param == "obstore":
        pytest.importorskip("obstore")
    return open_store(f"s3://{BUCKET}/run", engine=request.param, **server.storage_options)


@pytest.mark.parametrize("kind", ["upload-part", "complete-upload"])
def test_who_fails_leaves_what_another_writer_has_completed(
    server: FakeS3, store: Store, kind: Kind
) -> None:
    late = store.create("x", SIZE)
    write(store, "x", b"1" * SIZE)
    server.faults = [Fault(kinds=[kind], status=403, code="AccessDenied")]
    with pytest.raises(AccessDenied), late:
        late.write(b"2" * SIZE)
    server.faults = []
    assert store.read("x") == b"1" * SIZE
    assert not server.uploads


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
@pytest.mark.parametrize(("size", "skip"), [(10, 0), (2 * SIZE, 1)])
def test_what_a_server_has_dropped_is_no_missing_object(engine: str, size: int, skip: int) -> None:
    pytest.importorskip("gcsfs")
    pytest.importorskip(engine)
    with fake_gcs() as server:
        options = server.obstore_options if engine == "obstore" else server.storage_options
        store = open_store(f"gs://{BUCKET}/run", engine=engine, **options)
        server.faults = [Fault(does="swallow", kinds=["put", "upload-part"], skip=skip, limit=1)]
        with pytest.raises(StorageError) as caught:
            write(store, "x", b"1" * size)
        assert not isinstance(caught.value, ObjectNotFound)
        assert not store.exists("x")
