"""Two writers of one large object, by both engines: neither loses or gets what is the other's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtckpt.errors import AccessDenied
from dtckpt.storage import Store, open_store
from dtckpt.storage.remote.streams import PART_BYTES
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
