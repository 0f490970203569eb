"""Reading: exact ranges, never fewer bytes."""

from __future__ import annotations

import time

import pytest

from dtckpt.errors import ObjectNotFound, StorageError

from ...base import ObjectInfo, ReadRequest, Store
from .basics import DATA, Raw, Suite, write


class ReadingTests(Suite):
    """Sizes, ranges, buffers."""

    def test_stat(self, store: Store, raw: Raw) -> None:
        raw.put("a/b", DATA)
        found = store.stat("a/b")
        assert found == ObjectInfo("a/b", len(DATA))
        assert found.modified is None or abs(found.modified - time.time()) < 3600
        assert store.stat("a/b").modified == found.modified
        assert store.exists("a/b")

    def test_missing(self, store: Store) -> None:
        assert not store.exists("missing")
        for call in (store.stat, store.read):
            with pytest.raises(ObjectNotFound, match="missing"):
                call("missing")
        with pytest.raises(ObjectNotFound, match="missing"):
            store.read("missing", 0, 1)
        with pytest.raises(ObjectNotFound, match="missing"):
            store.read_into("missing", [ReadRequest(0, bytearray(1))])

    def test_a_directory_is_not_an_object(self, store: Store, raw: Raw) -> None:
        raw.put("a/b", DATA)
        assert not store.exists("a")
        with pytest.raises(ObjectNotFound):
            store.read("a")
        with pytest.raises(ObjectNotFound):
            store.read("a/b/c")

    @pytest.mark.parametrize(
        ("start", "stop"),
        [(0, None), (0, 1280), (0, 1), (1279, 1280), (7, 300), (5, None), (0, 0), (1280, 1280)],
    )
    def test_ranges_are_exact(self, store: Store, raw: Raw, start: int, stop: int | None) -> None:
        raw.put("x", DATA)
        assert store.read("x", start, stop) == DATA[start:stop]

    @pytest.mark.parametrize(
        ("start", "stop"), [(0, 1281), (1280, 1290), (2000, 2001), (1281, None)]
    )
    def test_past_the_end(self, store: Store, raw: Raw, start: int, stop: int | None) -> None:
        raw.put("some/name", DATA)
        with pytest.raises(StorageError, match=rf"{start}:.*some/name.*1280"):
            store.read("some/name", start, stop)

    @pytest.mark.parametrize(("start", "stop"), [(-1, None), (5, 4), (0, -1)])
    def test_impossible_ranges(self, store: Store, start: int, stop: int | None) -> None:
        with pytest.raises(ValueError, match="range"):
            store.read("x", start, stop)

    def test_read_into_many_buffers(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        spans = [(700, 900), (0, 10), (10, 20), (20, 20), (5, 15), (1279, 1280)]
        buffers = [bytearray(stop - start) for start, stop in spans]
        requests = [ReadRequest(s, buffer) for (s, _), buffer in zip(spans, buffers, strict=True)]
        store.read_into("x", requests)
        assert buffers == [DATA[start:stop] for start, stop in spans]

    def test_read_each_yields_what_is_filled(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        spans = [(700, 900), (0, 10), (10, 20), (20, 20), (5, 15), (1279, 1280)]
        requests = [ReadRequest(start, bytearray(stop - start)) for start, stop in spans]
        found = {r: bytes(r.view) for r in store.read_each("x", requests)}
        assert found == {r: DATA[r.offset : r.stop] for r in requests}

    def test_read_each_past_the_end(self, store: Store, raw: Raw) -> None:
        raw.put("some/name", DATA)
        requests = [ReadRequest(0, bytearray(10)), ReadRequest(1275, bytearray(10))]
        with pytest.raises(StorageError, match=r"some/name.*1280"):
            list(store.read_each("some/name", requests))
        with pytest.raises(ObjectNotFound, match="missing"):
            list(store.read_each("missing", requests))

    def test_read_into_typed_memory(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        buffer = bytearray(40)
        store.read_into("x", [ReadRequest(8, memoryview(buffer).cast("d", (5, 1)))])
        assert buffer == DATA[8:48]

    def test_read_into_past_the_end(self, store: Store, raw: Raw) -> None:
        raw.put("some/name", DATA)
        requests = [ReadRequest(0, bytearray(10)), ReadRequest(1275, bytearray(10))]
        with pytest.raises(StorageError, match=r"some/name.*1280"):
            store.read_into("some/name", requests)

    def test_read_into_nothing(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        store.read_into("x", [])

    def test_read_each_leaves_alone_what_it_yielded(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        requests = [ReadRequest(start, bytearray(200)) for start in range(0, 1000, 100)]
        for request in store.read_each("x", requests):
            assert request.view == DATA[request.offset : request.stop]
            request.view[:] = bytes(200)
        assert all(request.view == bytes(200) for request in requests)

    def test_read_each_may_end_early(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        requests = [ReadRequest(start, bytearray(10)) for start in range(0, 1000, 10)]
        found = iter(store.read_each("x", requests))
        assert next(found).view.nbytes == 10
        del found
        assert store.read("x") == DATA

    def test_read_start(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        raw.put("empty", b"")
        for most in (0, 1, 1279, 1280, 5000):
            assert store.read_start("x", most) == DATA[:most]
            assert store.read_start("empty", most) == b""
        with pytest.raises(ObjectNotFound, match="missing"):
            store.read_start("missing", 10)
        assert store.request_bytes > 0

    def test_big_objects(self, store: Store) -> None:
        data = b"".join(number.to_bytes(8, "big") for number in range(self.big_bytes // 8))
        with store.create("big", len(data)) as stream:
            place = 0
            for size in (1, 5 << 20, 3, 7 << 20, len(data)):
                stream.write(memoryview(data)[place : place + size])
                place = min(place + size, len(data))
        assert store.stat("big").size == len(data)
        assert store.read("big") == data
        step = len(data) // 5
        requests = [ReadRequest(start, bytearray(step)) for start in range(0, step * 5, step)]
        for request in store.read_each("big", requests[::-1]):
            assert request.view == data[request.offset : request.stop]
        end = bytearray(100)
        store.read_into("big", [ReadRequest(len(data) - 100, end), ReadRequest(0, bytearray(1))])
        assert end == data[-100:]

    def test_reading_leaves_the_object_alone(self, store: Store, raw: Raw) -> None:
        write(store, "x", DATA)
        store.read_into("x", [ReadRequest(0, bytearray(len(DATA)))])
        assert raw.get("x") == DATA
