"""Names: what may be one, what is told of them, and what goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dtckpt.errors import ObjectNotFound

from ...base import Level, ObjectInfo, Store
from .basics import BAD_NAMES, DATA, Raw, Suite, names, write


class NamingTests(Suite):
    """Names, listings, deleting, places within and beside."""

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
        around = child.parent()
        assert around is None or around.url == f"{store.url}/a/b"
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

    def test_context_manager(self, store: Store) -> None:
        with store as same:
            assert same is store

    def test_levels_agree_with_lists(self, store: Store, raw: Raw) -> None:
        objects = ["a/b/c/d/e", "a/b/c/f", "a/b-/x", "a/b.c", "a.b/x", "z", "z-", "\uffee/x"]
        objects += ["\U0001f600/x", "a/b/c/d/" + "/".join("deep" * 3)]
        for name in objects:
            raw.put(name, name.encode())

        def walk(prefix: str) -> Iterator[ObjectInfo]:
            level = store.level(prefix)
            yield from level.objects
            for folder in level.folders:
                assert folder.startswith(prefix)
                yield from walk(folder)

        for prefix in ("", "a", "a/b", "a/b/c/d", "a.b", "z", "none"):
            found = sorted(walk(prefix), key=lambda info: info.name)
            assert found == list(store.list(prefix))
        assert names(store) == sorted(objects)

    def test_deleted_objects_are_missing(self, store: Store, raw: Raw) -> None:
        raw.put("a/x", DATA)
        store.delete(["a/x"])
        assert not store.exists("a/x")
        with pytest.raises(ObjectNotFound):
            store.read("a/x")
        assert store.level("a") == Level((), ())
