"""What the parts of the suite have in common: data, ways to look, what a store may be excused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from dtckpt.errors import ObjectExists, ObjectNotFound

from ...base import Store

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


class Suite:
    """What a store is excused from; a subclass says so by setting these."""

    one_winner = True
    """Whether, of several writers that publish or replace at once, one wins and the others know."""
    one_remover = True
    """Whether the same holds where some of them remove."""
    num_races = 3
    """How often each race is run."""
    big_bytes = 20 << 20
    """How large the objects are that are written and read in pieces."""


class ThroughStore:
    """The bytes of a store by way of the store itself, for want of another one."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, name: str, data: bytes) -> None:
        self._store.publish(name, data, overwrite=True)

    def get(self, name: str) -> bytes | None:
        try:
            return self._store.read(name)
        except ObjectNotFound:
            return None


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
