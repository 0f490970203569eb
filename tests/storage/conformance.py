"""What every store must do. Each kind of store subclasses ``StoreTests`` in its own module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError
from dtckpt.storage import Level, ObjectInfo, ReadRequest, Store

DATA = bytes(range(256)) * 5

BAD_NAMES = ["", ".", "..", "/a", "a/", "a//b", "a/./b", "a/../b", "../a", "a\\b", "a\0b", "\udcff"]


class Raw(Protocol):
    """A way to the bytes of a store that does not lead through it."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes | None:
        """``None`` if nothing has this name."""
        ...


def names(store: Store, prefix: str = "") -> list[str]:
    return [item.name for item in store.list(prefix)]


def write(store: Store, name: str, data: bytes) -> None:
    with store.create(name, len(data)) as stream:
        stream.write(data)


class Interrupted(BaseException):
    """Like Ctrl-C: not an ``Exception``."""


class StoreTests:
    """Subclasses give the fixtures ``store`` and ``raw``."""

    one_winner = True
    """Whether exclusive publication is atomic."""
    num_races = 3

    # -- reading

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

    # -- writing

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
            with pytest.raises(ObjectExists):
                store.create(name, 0)
            with pytest.raises(ObjectExists):
                store.publish(name, b"", overwrite=False)

    def test_create_never_overwrites(self, store: Store, raw: Raw) -> None:
        raw.put("a/x", DATA)
        with pytest.raises(ObjectExists, match="a/x"):
            store.create("a/x", 3)
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

    def test_an_object_may_end_before_its_first_byte(self, store: Store, raw: Raw) -> None:
        with store.create("x", 10) as stream:
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

    # -- publishing

    def test_publish(self, store: Store, raw: Raw) -> None:
        store.publish("a/x", b"one", overwrite=False)
        assert raw.get("a/x") == b"one"
        with pytest.raises(ObjectExists, match="a/x"):
            store.publish("a/x", b"two", overwrite=False)
        assert raw.get("a/x") == b"one"
        store.publish("a/x", b"three", overwrite=True)
        assert raw.get("a/x") == b"three"
        store.publish("a/y", b"new", overwrite=True)
        assert raw.get("a/y") == b"new"
        assert list(store.leftovers()) == []

    def test_replace(self, store: Store, raw: Raw) -> None:
        with pytest.raises(ObjectNotFound, match="a/x"):
            store.replace("a/x", b"two", expected=b"one")
        store.publish("a/x", b"one", overwrite=False)
        for wrong in (b"", b"on", b"One", b"one!"):
            with pytest.raises(ObjectExists, match="a/x"):
                store.replace("a/x", b"two", expected=wrong)
            assert raw.get("a/x") == b"one"
        store.replace("a/x", b"two", expected=b"one")
        assert raw.get("a/x") == b"two"
        store.replace("a/x", b"", expected=b"two")
        assert raw.get("a/x") == b""
        assert list(store.leftovers()) == []

    def test_remove(self, store: Store, raw: Raw) -> None:
        with pytest.raises(ObjectNotFound, match="a/x"):
            store.remove("a/x", expected=b"one")
        raw.put("a/x", b"one")
        for wrong in (b"", b"on", b"One", b"one!"):
            with pytest.raises(ObjectExists, match="a/x"):
                store.remove("a/x", expected=wrong)
            assert raw.get("a/x") == b"one"
        store.remove("a/x", expected=b"one")
        assert raw.get("a/x") is None
        assert names(store) == []

    def test_racing_replacements(self, store: Store) -> None:
        if not self.one_winner:
            pytest.skip("this store compares, then writes")
        store.publish("x", b"0", overwrite=False)
        for turn in range(self.num_races):
            assert len(race(store, "x", replacing=store.read("x"))) == 1, turn
        assert list(store.leftovers()) == []

    def test_times(self, store: Store) -> None:
        with store.create("x", 1) as stream:
            stream.write(b"1")
            assert list(store.leftovers(before=time.time() - 3600)) == []
            assert sorted(store.leftovers(before=time.time() + 3600)) == sorted(store.leftovers())
        (info,) = store.list()
        assert info.modified is None or abs(info.modified - time.time()) < 3600

    def test_racing_publishers(self, store: Store) -> None:
        if not self.one_winner:
            pytest.skip("this store checks, then writes")
        for turn in range(self.num_races):
            assert len(race(store, f"race-{turn}")) == 1
            assert names(store) == [f"race-{i}" for i in range(turn + 1)]

    def test_readers_see_old_or_new(self, store: Store) -> None:
        versions = [bytes([65 + number]) * (3000 + number) for number in range(6)]
        store.publish("x", versions[0], overwrite=False)
        done = threading.Event()

        def watch() -> set[bytes]:
            seen: set[bytes] = set()
            while not done.is_set():
                seen.add(store.read("x", 0, 3000))
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(watch) for _ in range(2)]
            for version in versions[1:]:
                store.publish("x", version, overwrite=True)
            done.set()
            seen = {data for reader in readers for data in reader.result()}
        assert seen <= {version[:3000] for version in versions}
        assert store.read("x") == versions[-1]

    # -- names, listing, deleting

    @pytest.mark.parametrize(
        "name",
        [
            "\u00fcml\u00e4ut/\u65e5\u672c.bin",
            "w[0:4,8]",
            "a*b?",
            "sp ace",
            "q&=%25+#",
            "...",
            ".x",
            "n" * 220,
        ],
    )
    def test_odd_names(self, store: Store, raw: Raw, name: str) -> None:
        raw.put("w0", b"keep")
        write(store, name, b"123")
        assert raw.get(name) == store.read(name) == b"123"
        assert store.stat(name).name == name
        assert names(store) == sorted([name, "w0"])
        store.delete([name])
        assert names(store) == ["w0"]

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_names(self, store: Store, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.stat(name),
            lambda: store.exists(name),
            lambda: store.read(name),
            lambda: store.read_into(name, []),
            lambda: store.create(name, 0),
            lambda: store.publish(name, b"", overwrite=True),
            lambda: store.delete(["good", name]),
            lambda: store.substore(name),
        ]
        if name:
            calls.append(lambda: list(store.list(name)))
        for call in calls:
            with pytest.raises(ValueError, match="name"):
                call()

    def test_list(self, store: Store, raw: Raw) -> None:
        sizes = {"a/z": 1, "a/b/c": 2, "a-b": 3, "ab/c": 4, "B": 5, "a/b.c": 6}
        for name, size in sizes.items():
            raw.put(name, bytes(size))
        assert list(store.list()) == [ObjectInfo(name, sizes[name]) for name in sorted(sizes)]
        assert names(store, "a") == ["a/b.c", "a/b/c", "a/z"]
        assert names(store, "a/b") == ["a/b/c"]
        assert names(store, "B") == names(store, "none") == []

    def test_one_level(self, store: Store, raw: Raw) -> None:
        sizes = {"a/z": 1, "a/b/c": 2, "a-b": 3, "ab/c": 4, "B": 5, "a/b.c": 6, "a/b/d/e": 7}
        for name, size in sizes.items():
            raw.put(name, bytes(size))
        assert store.level() == Level((ObjectInfo("B", 5), ObjectInfo("a-b", 3)), ("a", "ab"))
        assert store.level("a") == Level((ObjectInfo("a/b.c", 6), ObjectInfo("a/z", 1)), ("a/b",))
        assert store.substore("a").level("b") == Level((ObjectInfo("b/c", 2),), ("b/d",))
        assert store.level("B") == store.level("none") == store.level("a/z") == Level((), ())

    def test_one_level_hides_unfinished_writes(self, store: Store) -> None:
        with store.create("x", 1) as stream:
            stream.write(b"1")
            assert store.level().objects == ()
        assert store.level() == Level((ObjectInfo("x", 1),), ())

    def test_list_of_nothing(self, store: Store) -> None:
        assert names(store) == list(store.leftovers()) == []
        assert store.level() == Level((), ())

    def test_list_hides_unfinished_writes(self, store: Store) -> None:
        with store.create("a/x", 1) as stream:
            stream.write(b"1")
            assert names(store) == []
            for name in store.leftovers():
                with pytest.raises(ValueError, match="reserved"):
                    store.read(name)
        assert list(store.leftovers()) == []

    def test_delete(self, store: Store, raw: Raw) -> None:
        for name in ("a/b/x", "a/b/y", "c"):
            raw.put(name, DATA)
        store.delete(iter(["a/b/x", "missing", "c/missing", "a/b"]))
        assert names(store) == ["a/b/y", "c"]
        store.delete(["a/b/y", "c", "c"])
        assert names(store) == []
        write(store, "a/b/x", b"again")
        assert raw.get("a/b/x") == b"again"

    def test_bad_names_delete_nothing(self, store: Store, raw: Raw) -> None:
        raw.put("x", DATA)
        with pytest.raises(ValueError, match="name"):
            store.delete(["x", "../y"])
        assert raw.get("x") == DATA

    def test_substore(self, store: Store, raw: Raw) -> None:
        child = store.substore("a/b").substore("c")
        assert child.url == f"{store.url}/a/b/c"
        write(child, "d/x", b"123")
        child.publish("y", b"4", overwrite=False)
        raw.put("a/b/cc", b"outside")
        assert raw.get("a/b/c/d/x") == b"123"
        assert names(child) == ["d/x", "y"]
        assert names(child, "d") == ["d/x"]
        assert child.read("d/x", 1) == b"23"
        child.delete(["d/x", "y"])
        assert names(store) == ["a/b/cc"]

    def test_sibling(self, store: Store) -> None:
        child = store.substore("run/step-1")
        child.publish("x", b"1", overwrite=False)
        other = child.sibling("step-2")
        other.publish("x", b"2", overwrite=False)
        assert names(store) == ["run/step-1/x", "run/step-2/x"]
        assert other.url == store.substore("run/step-2").url
        assert other.sibling("step-1").read("x") == b"1"
        assert child.substore("data").sibling("data").sibling("x").url == f"{child.url}/x"
        for name in ("a/b", "..", ""):
            with pytest.raises(ValueError, match="bad"):
                child.sibling(name)

    def test_threads(self, store: Store) -> None:
        def cycle(number: int) -> bytes:
            write(store, f"t/{number}", bytes([number]) * 100)
            return store.read(f"t/{number}")

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(cycle, range(8)))
        assert results == [bytes([number]) * 100 for number in range(8)]
        assert len(names(store, "t")) == 8

    def test_context_manager(self, store: Store) -> None:
        with store as same:
            assert same is store


def write_as(store: Store, name: str, announced: int, data: bytes) -> None:
    with store.create(name, announced) as stream:
        stream.write(data)


def race(
    store: Store, name: str, num_writers: int = 8, replacing: bytes | None = None
) -> list[bytes]:
    """Publish from many threads at once; what the winners wrote. All others must be told."""
    barrier = threading.Barrier(num_writers)

    def publish(number: int) -> bytes | None:
        data = f"writer {number} in place of {replacing}".encode()
        barrier.wait()
        try:
            if replacing is None:
                store.publish(name, data, overwrite=False)
            else:
                store.replace(name, data, expected=replacing)
        except ObjectExists:
            return None
        return data

    with ThreadPoolExecutor(num_writers) as pool:
        winners = [data for data in pool.map(publish, range(num_writers)) if data is not None]
    assert store.read(name) in winners
    return winners
