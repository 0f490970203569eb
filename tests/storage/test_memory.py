"""The in-process store, and the interface's own value types."""

from __future__ import annotations

import pytest

from dtckpt.storage import MemoryStore, ReadRequest, Store

from .conformance import Raw, StoreTests


class RawDict:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def get(self, name: str) -> bytes | None:
        return self.objects.get(name)


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def raw(self) -> Raw:
        return RawDict()

    @pytest.fixture
    def store(self, raw: RawDict) -> Store:
        return MemoryStore(raw.objects)

    def test_stores_are_apart(self) -> None:
        first, second = MemoryStore(), MemoryStore()
        first.publish("x", b"1", overwrite=False)
        assert not second.exists("x")
        assert first.url != second.url


def test_read_request() -> None:
    request = ReadRequest(3, memoryview(bytearray(16)).cast("I"))
    assert request.view.nbytes == 16
    assert request.stop == 19
    with pytest.raises(ValueError, match="offset"):
        ReadRequest(-1, bytearray(1))
    with pytest.raises(ValueError, match="writable"):
        ReadRequest(0, b"123")
    with pytest.raises(ValueError, match="contiguous"):
        ReadRequest(0, memoryview(bytearray(8))[::2])
