"""Writing: all of an object or nothing, under a name that was free."""

from __future__ import annotations

import gc
from array import array
from contextlib import suppress

import pytest

from dtckpt.errors import ObjectExists, StorageError

from ...base import ObjectInfo, Store
from .basics import DATA, Interrupted, Raw, Suite, names, write, write_as


class WritingTests(Suite):
    """Streams, and how they end."""

    def test_create(self, store: Store, raw: Raw) -> None:
        with store.create("a/b/c", len(DATA)) as stream:
            assert stream.size == 0
            buffer = bytearray(DATA[:1000])
            stream.write(buffer)
            buffer[:] = bytes(1000)  # the stream is not to look again
            stream.write(memoryview(DATA)[1000:])
            assert stream.size == len(DATA)
            assert not store.exists("a/b/c")
            assert raw.get("a/b/c") is None
            assert names(store) == []
        assert raw.get("a/b/c") == DATA
        assert store.read("a/b/c") == DATA

    def test_empty_objects(self, store: Store, raw: Raw) -> None:
        with store.create("created", 0):
            pass
        store.publish("published", b"", overwrite=False)
        assert raw.get("created") == raw.get("published") == b""
        assert store.read("created") == b""
        assert list(store.list()) == [ObjectInfo("created", 0), ObjectInfo("published", 0)]
        for name in ("created", "published"):
            with pytest.raises(ObjectExists), store.create(name, 0):
                pass
            with pytest.raises(ObjectExists):
                store.publish(name, b"", overwrite=False)

    def test_create_never_overwrites(self, store: Store, raw: Raw) -> None:
        raw.put("a/x", DATA)
        with pytest.raises(ObjectExists, match="a/x"), store.create("a/x", 3) as stream:
            stream.write(b"new")
        assert raw.get("a/x") == DATA
        assert names(store) == ["a/x"]

    def test_close_never_overwrites(self, store: Store, raw: Raw) -> None:
        stream = store.create("x", 3)
        stream.write(b"new")
        raw.put("x", DATA)
        with pytest.raises(ObjectExists, match="x"):
            stream.close()
        assert raw.get("x") == DATA

    @pytest.mark.parametrize("written", [b"", b"12", b"1234"])
    def test_wrong_size_leaves_nothing(self, store: Store, raw: Raw, written: bytes) -> None:
        with pytest.raises(StorageError, match=f"3 bytes.*{len(written)}"):
            write_as(store, "x", 3, written)
        assert raw.get("x") is None
        assert names(store) == []
        write(store, "x", b"123")  # the name is free again

    @pytest.mark.parametrize("announced", [3, 1000, 40 << 20])
    def test_an_object_may_end_before_its_announced_size(
        self, store: Store, raw: Raw, announced: int
    ) -> None:
        with store.create("x", announced) as stream:
            stream.write(b"12")
            stream.write(b"3")
            stream.shorten()
            assert stream.size == 3
        assert raw.get("x") == b"123"
        assert store.stat("x").size == 3
        assert store.read("x") == b"123"
        with pytest.raises(StorageError):
            store.read("x", 0, 4)

    def test_nothing_is_written_beyond_a_shortened_end(self, store: Store) -> None:
        stream = store.create("x", 10)
        stream.write(b"123")
        stream.shorten()
        with pytest.raises(StorageError, match=r"3 bytes.*4"):
            stream.write(b"4")
        with pytest.raises(StorageError, match="failed"):
            stream.shorten()
        stream.abort()
        assert not store.exists("x")

    @pytest.mark.parametrize("announced", [10, 40 << 20])
    def test_an_object_may_end_before_its_first_byte(
        self, store: Store, raw: Raw, announced: int
    ) -> None:
        with store.create("x", announced) as stream:
            stream.shorten()
        assert raw.get("x") == b""

    def test_close_after_a_failed_write(self, store: Store) -> None:
        stream = store.create("x", 3)
        with pytest.raises(StorageError):
            stream.write(b"1234")
        with pytest.raises(StorageError, match="failed"):
            stream.write(b"1")
        with pytest.raises(StorageError, match="failed"):
            stream.close()
        assert not store.exists("x")

    def test_abort_leaves_nothing(self, store: Store, raw: Raw) -> None:
        stream = store.create("a/x", 3)
        stream.write(b"123")
        stream.abort()
        stream.abort()
        assert raw.get("a/x") is None
        assert names(store) == list(store.leftovers()) == []
        with pytest.raises(StorageError, match="aborted"):
            stream.write(b"")
        with pytest.raises(StorageError, match="aborted"):
            stream.close()

    def test_abort_in_the_block(self, store: Store) -> None:
        with store.create("x", 3) as stream:
            stream.abort()
        assert not store.exists("x")

    def test_abort_after_close_does_nothing(self, store: Store, raw: Raw) -> None:
        with store.create("x", 3) as stream:
            stream.write(b"123")
            stream.close()
            stream.close()
        stream.abort()
        assert raw.get("x") == b"123"

    @pytest.mark.parametrize("kind", [RuntimeError, Interrupted])
    def test_exception_in_the_block_leaves_nothing(
        self, store: Store, raw: Raw, kind: type[BaseException]
    ) -> None:
        def interrupted() -> None:
            with store.create("x", 3) as stream:
                stream.write(b"123")
                raise kind

        with pytest.raises(kind):
            interrupted()
        assert raw.get("x") is None
        assert names(store) == list(store.leftovers()) == []

    def test_bad_size(self, store: Store) -> None:
        with pytest.raises(ValueError, match="size"):
            store.create("x", -1)

    def test_buffers_of_any_type(self, store: Store, raw: Raw) -> None:
        numbers = array("d", [1.0, 2.0, 3.0])
        with store.create("x", 29) as stream:
            stream.write(numbers)
            stream.write(memoryview(bytearray(b"12345")))
            with pytest.raises(ValueError, match="contiguous"):
                stream.write(memoryview(bytearray(8))[::2])
        assert raw.get("x") == numbers.tobytes() + b"12345"

    def test_dropped_streams_leave_nothing(self, store: Store, raw: Raw) -> None:
        stream = store.create("x", 3)
        stream.write(b"123")
        del stream
        gc.collect()
        assert raw.get("x") is None
        assert names(store) == []
        store.delete(list(store.leftovers()))
        write(store, "x", b"321")
        assert raw.get("x") == b"321"

    def test_who_closes_first_has_the_name(self, store: Store, raw: Raw) -> None:
        first, second, third = (store.create("x", 3) for _ in range(3))
        for number, stream in enumerate((first, second, third)):
            stream.write(bytes([number]) * 3)
        second.close()
        with pytest.raises(ObjectExists, match="x"):
            first.close()
        third.abort()
        assert raw.get("x") == bytes([1]) * 3
        assert names(store) == ["x"]

    def test_leftovers_are_unfinished_writes_only(self, store: Store, raw: Raw) -> None:
        write(store, "a/done", b"1")
        stream = store.create("a/x", 3)
        stream.write(b"123")
        found = list(store.leftovers())
        assert "a/done" not in found
        assert found == list(store.leftovers("a"))
        assert list(store.leftovers("b")) == []
        store.delete(found)
        assert list(store.leftovers()) == []
        with suppress(StorageError):  # its bytes may have gone
            stream.abort()
        assert raw.get("a/done") == b"1"
        assert names(store) == ["a/done"]
