"""What a store really does, found out by trying it: servers promise more than some of them keep."""

from __future__ import annotations

import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError

from .base import Store
from .local.store import LocalStore
from .open import open_store

_NUM_RACES = 3
_NUM_RACERS = 6
_NUM_ASKED = 5
_LARGE_BYTES = 17 << 20
"""More than one part of an upload."""


_one_at_a_time = threading.Lock()


def _forget_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store was seen to do. None: not tried, or nothing was told."""

    url: str
    """Of the store that was asked, without secrets."""
    latency: float
    """Seconds until a small request is answered, the median of a few."""
    conditional_create: bool | None = None
    """Whether an object that came meanwhile is kept when one of its name is created. Where it is
    not, two saves to one path may both report success, if nobody reads back; a commit does."""
    conditional_replace: bool | None = None
    """Whether one of several writers that replace an object at once wins, and the others are told.
    Seen in races: a store that compares and then writes loses them nearly always, not certainly."""
    conditional_remove: bool | None = None
    """The same where some of them remove it. Where it is not, who removes an object may remove what
    another one has just put in its place."""
    atomic_visibility: bool | None = None
    """Whether nothing is seen of an object before it is complete."""
    consistent_listing: bool | None = None
    """Whether listings tell at once of what was written, and no more of what was deleted."""
    tells_unfinished: bool | None = None
    """Whether large objects that are being written are told as leftovers, so that those of killed
    processes can be found; a store that holds nothing of them does not tell any either. None, too,
    where listing them is refused: some servers that speak S3 do not know it."""
    refuses_past_the_end: bool | None = None
    """Whether a range past the end of an object is an error and not fewer bytes."""
    clock_skew: float | None = None
    """Seconds by which the store's clock is ahead of this machine's, to its own precision."""


_found: dict[tuple[str, str], tuple[weakref.ref[Store], Capabilities]] = {}
"""By bucket and options; an open store, which does not tell its options, has "open" there."""


def capabilities(
    target: str | os.PathLike[str] | Store, *, write: bool = True, **options: object
) -> Capabilities:
    """Try what the store at ``target`` does, once in this process for a bucket and its options.

    Of an open store the last one of a bucket is remembered, and asked once.

    Some small objects and one of 17 MiB are written to a folder of their own, ``.dtckpt-probe-...``
    below the target, and deleted. It takes about 100 requests. Several processes may do it at once,
    but of a job with many ranks one does better, and tells the others.

    Without ``write`` nothing is written, and only the latency is known. Errors are those of
    ``open_store``, and ``StorageError`` where the store cannot be written to, or not be read.
    """
    store = open_store(target, **options)
    is_open = store is target
    key = _root(store.url), "open" if is_open else repr(sorted(options.items()))
    with _one_at_a_time:
        asked, found = _found.get(key, (None, None))
        if asked is not None and is_open and asked() is not store:
            found = None  # the same bucket, perhaps of another server or for another user
        if found is None or (write and found.atomic_visibility is None):
            found = _probe(store, write=write)
            _found[key] = weakref.ref(store), found
    return replace(found, url=store.url)


def _root(url: str) -> str:
    """The bucket of a URL; a path is a root by itself, since any may be a mount."""
    scheme, is_url, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if is_url else url


def _probe(store: Store, *, write: bool) -> Capabilities:
    found = Capabilities(url=store.url, latency=_latency(store))
    if not write:
        return found
    with _folder(store) as folder:

        def replace_it(number: int) -> None:
            folder.replace("raced", b"new %d" % number, expected=b"old")

        def remove_it(_: int) -> None:
            folder.remove("raced", expected=b"old")

        created, is_atomic = _created_twice(folder)
        listing, skew = _listed(folder)
        return replace(
            found,
            conditional_create=created,
            atomic_visibility=is_atomic,
            consistent_listing=listing,
            clock_skew=skew,
            refuses_past_the_end=_refuses_past_the_end(folder),
            tells_unfinished=_tells_unfinished(folder),
            conditional_replace=_one_wins(folder, replace_it),
            conditional_remove=_one_wins(
                folder, lambda number: remove_it(number) if number % 2 else replace_it(number)
            ),
        )


@contextmanager
def _folder(store: Store) -> Generator[Store]:
    """A place for the probe alone, of which nothing is left."""
    made = _missing_directories(store)
    name = f".dtckpt-probe-{os.urandom(8).hex()}"
    try:
        yield store.substore(name)
    finally:
        store.delete([info.name for info in store.list(name)])
        with suppress(StorageError):  # a server may not tell of any
            store.delete(list(store.leftovers(name)))
        with suppress(OSError):  # somebody else has put something there
            for directory in made:
                os.rmdir(directory)


def _missing_directories(store: Store) -> list[str]:
    """The directories that a local store will make for its root, the innermost first."""
    made: list[str] = []
    directory = store.url if isinstance(store, LocalStore) else os.curdir
    while not os.path.isdir(directory):
        made.append(directory)
        directory = os.path.dirname(directory)
    return made


def _latency(store: Store) -> float:
    def ask() -> float:
        begun = time.perf_counter()
        store.exists(".dtckpt-probe")
        return time.perf_counter() - begun

    ask()  # connects
    return statistics.median(ask() for _ in range(_NUM_ASKED))


def _created_twice(store: Store) -> tuple[bool | None, bool]:
    """Whether creation is exclusive, and nothing shows before it is complete.

    Both streams find the name free, so that nothing but the last request can tell.
    """
    first = store.create("created", 5)
    first.write(b"first")
    try:
        second = store.create("created", 6)
    except ObjectExists:
        first.abort()
        return None, False
    second.write(b"second")
    is_atomic = not store.exists("created") and not list(store.list())
    first.close()
    with suppress(ObjectExists):
        second.close()
    return store.read("created") == b"first", is_atomic


def _listed(store: Store) -> tuple[bool, float | None]:
    """Whether listings are up to date, and how far the store's clock is ahead."""
    begun = time.time()
    store.publish("listed/x", b"1", overwrite=False)
    ended = time.time()
    seen = [info.name for info in store.list("listed")]
    seen += [info.name for info in store.level("listed").objects]
    modified = store.stat("listed/x").modified
    store.delete(["listed/x"])
    is_gone = not list(store.list("listed")) and not store.level("listed").objects
    skew = None if modified is None else modified - (begun + ended) / 2
    return seen == ["listed/x"] * 2 and is_gone, skew


def _refuses_past_the_end(store: Store) -> bool:
    store.publish("short", b"12345", overwrite=True)
    try:
        store.read("short", 3, 10)
    except StorageError:
        return True
    return False


def _tells_unfinished(store: Store) -> bool | None:
    """Whether an object that is being written is told; None where asking for such is refused."""
    stream = store.create("large", _LARGE_BYTES)
    try:
        stream.write(bytes(_LARGE_BYTES))
        with suppress(StorageError):
            return any("large" in name for name in store.leftovers())
        list(store.list())  # what fails for another reason fails here, too
        return None
    finally:
        stream.abort()


def _one_wins(store: Store, act: Callable[[int], object]) -> bool:
    """Whether of several threads that act on one object at once, each time one succeeds."""
    for _ in range(_NUM_RACES):
        store.publish("raced", b"old", overwrite=True)
        barrier = threading.Barrier(_NUM_RACERS)

        def race(number: int, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                act(number)
            except (ObjectExists, ObjectNotFound):
                return False
            return True

        with ThreadPoolExecutor(_NUM_RACERS) as pool:
            if sum(pool.map(race, range(_NUM_RACERS))) != 1:
                return False
    return True
