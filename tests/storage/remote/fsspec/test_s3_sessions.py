"""Files that describe S3 are read once, credentials are of each store alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import botocore.loaders
import pytest

from dtckpt.storage import open_store

from ....servers.fake_s3 import BUCKET, FakeS3, fake_s3

# botocore warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as running:
        yield running


def test_a_second_store_reads_no_descriptions(
    server: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use() -> None:
        with open_store(f"s3://{BUCKET}/run", **server.storage_options) as store:
            store.publish("x", b"1", overwrite=True)

    use()
    read: list[str] = []
    real = botocore.loaders.JSONFileLoader.load_file

    def load_file(self: Any, path: str) -> Any:
        found = real(self, path)
        if found is not None:
            read.append(path)
        return found

    monkeypatch.setattr(botocore.loaders.JSONFileLoader, "load_file", load_file)
    use()
    assert read == []


def test_a_session_that_is_given_is_used(server: FakeS3) -> None:
    from aiobotocore.session import AioSession

    made: list[str] = []

    class Session(AioSession):
        def create_client(self, *args: Any, **options: Any) -> Any:
            made.append(args[0])
            return super().create_client(*args, **options)

    options = server.storage_options | {"session": Session()}
    store = open_store(f"s3://{BUCKET}/run", **options)
    store.publish("x", b"1", overwrite=True)
    assert made == ["s3"]
