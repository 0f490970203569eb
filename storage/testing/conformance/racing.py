"""Races: many threads at once, and what each of them may see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dtckpt.errors import ObjectExists, ObjectNotFound

from ...base import Store
from .basics import Suite, names, race, write


class RacingTests(Suite):
    """Writers, readers and removers of one store."""

    def test_racing_replacements(self, store: Store) -> None:
        if not self.one_winner:
            pytest.skip("this store compares, then writes")
        store.publish("x", b"0", overwrite=False)
        for turn in range(self.num_races):
            assert len(race(store, "x", replacing=store.read("x"))) == 1, turn
        assert list(store.leftovers()) == []

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

    def test_threads(self, store: Store) -> None:
        def cycle(number: int) -> bytes:
            write(store, f"t/{number}", bytes([number]) * 100)
            return store.read(f"t/{number}")

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(cycle, range(8)))
        assert results == [bytes([number]) * 100 for number in range(8)]
        assert len(names(store, "t")) == 8

    def test_readers_see_nothing_or_all(self, store: Store) -> None:
        data = bytes(range(256)) * 4000
        done = threading.Event()

        def watch(_: int) -> set[int | None]:
            seen: set[int | None] = set()
            while not done.is_set():
                try:
                    seen.add(store.stat("x").size)
                    assert store.read("x") == data
                except ObjectNotFound:
                    seen.add(None)
                assert names(store) in ([], ["x"])
            return seen

        with ThreadPoolExecutor(3) as pool:
            watchers = [pool.submit(watch, number) for number in range(2)]
            try:
                write(store, "x", data)
            finally:
                done.set()
            seen = set[int | None]().union(*(watcher.result() for watcher in watchers))
        assert seen <= {None, len(data)}

    def test_listing_beside_writers(self, store: Store) -> None:
        stay = [f"stay/{number}" for number in range(3)]
        for name in stay:
            write(store, name, b"1")

        def come_and_go(number: int) -> None:
            for _ in range(self.num_races):
                write(store, f"go/{number}", b"22")
                store.delete([f"go/{number}"])

        with ThreadPoolExecutor(4) as pool:
            work = [pool.submit(come_and_go, number) for number in range(3)]
            while not all(one.done() for one in work):
                assert [name for name in names(store) if name.startswith("stay/")] == stay
                assert [info.name for info in store.level("stay").objects] == stay
            for one in work:
                one.result()
        assert names(store) == stay

    def test_streams_are_independent(self, store: Store) -> None:
        barrier = threading.Barrier(4)

        def stream_on(number: int) -> None:
            with store.create(f"x/{number}", 3000) as stream:
                for _ in range(3):
                    barrier.wait(60)
                    stream.write(bytes([number]) * 1000)
                if number == 2:
                    stream.abort()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(stream_on, range(4)))
        assert names(store) == ["x/0", "x/1", "x/3"]
        assert store.read("x/3") == bytes([3]) * 3000

    def test_racing_removals(self, store: Store) -> None:
        if not self.one_remover:
            pytest.skip("this store compares, then deletes")
        for turn in range(self.num_races):
            store.publish("x", b"old", overwrite=False)
            removals = [lambda: store.remove("x", expected=b"old")] * 6
            assert winners(removals) == 1, turn
            assert not store.exists("x")

    def test_removing_beside_replacing(self, store: Store) -> None:
        if not (self.one_winner and self.one_remover):
            pytest.skip("this store compares, then writes or deletes")
        for turn in range(self.num_races):
            store.publish("x", b"old", overwrite=True)

            def replace(number: int) -> None:
                store.replace("x", b"new %d" % number, expected=b"old")

            calls: list[Callable[[], None]] = [
                *(lambda number=number: replace(number) for number in range(3)),
                *(lambda: store.remove("x", expected=b"old") for _ in range(3)),
            ]
            assert winners(calls) == 1, turn
            assert not store.exists("x") or store.read("x").startswith(b"new")


def winners(calls: list[Callable[[], None]]) -> int:
    """Make all calls at once; return how many succeed. The others must say who was there before."""
    barrier = threading.Barrier(len(calls))

    def make(call: Callable[[], None]) -> bool:
        barrier.wait(60)
        try:
            call()
        except (ObjectExists, ObjectNotFound):
            return False
        return True

    with ThreadPoolExecutor(len(calls)) as pool:
        return sum(pool.map(make, calls))
