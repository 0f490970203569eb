"""Fetches of an object, several on their way at a time, told of as their buffers fill."""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from ..base import ReadRequest
from .ranges import Fetch, plan_fetches
from .s3_reads import stream

NUM_FETCHES = 16
"""Requests that read and are on their way at a time, over all stores and threads of a process.

What they bring goes into its buffers as it arrives from S3; what other drivers bring is held by
them until it is whole, 256 MiB at most."""

# One for the event loop of each process: fsspec makes a new loop after a fork.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class ShortRead(Exception):
    """An object has fewer bytes than were asked for."""


def fetch_each(fs: Any, path: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
    """Fill the buffers of all requests, and yield each that is full while others arrive.

    When this ends, or is closed, no buffer is touched any more. Raises what the driver raises, and
    ``ShortRead``.
    """
    left = Counter({request: request.view.nbytes for request in requests})
    full: queue.SimpleQueue[ReadRequest | BaseException] = queue.SimpleQueue()

    def copied(request: ReadRequest, num_bytes: int) -> None:
        left[request] -= num_bytes
        if not left[request]:
            full.put(request)

    empty = [request for request, num_bytes in left.items() if not num_bytes]
    num_waiting = len(left) - len(empty)
    fetches = plan_fetches(requests)

    async def fill(fetch: Fetch) -> None:
        try:
            async with _slots.setdefault(fs.loop, asyncio.Semaphore(NUM_FETCHES)):
                if hasattr(fs, "call_s3"):
                    await stream(fs, path, fetch, copied)
                else:
                    data = await fs._cat_file(path, start=fetch.start, end=fetch.stop)
                    fetch.take(memoryview(data), copied)
            _check_length(fetch)
        except BaseException as error:  # it must reach the reader, whatever it is
            full.put(error)

    yield from empty
    if not fs.async_impl:
        for fetch in fetches:
            fetch.take(memoryview(fs.cat_file(path, start=fetch.start, end=fetch.stop)), copied)
            _check_length(fetch)
            yield from _until_empty(full)
        return
    with _running(fs.loop, map(fill, fetches)):
        for _ in range(num_waiting):
            yield _found(full)


def _until_empty(full: queue.SimpleQueue[ReadRequest | BaseException]) -> Iterator[ReadRequest]:
    while not full.empty():
        yield _found(full)


def _found(full: queue.SimpleQueue[ReadRequest | BaseException]) -> ReadRequest:
    found = full.get()
    if isinstance(found, BaseException):
        raise found
    return found


def _check_length(fetch: Fetch) -> None:
    if fetch.position != fetch.stop:
        raise ShortRead(f"bytes {fetch.start}:{fetch.stop} end at {fetch.position}")


@contextmanager
def _running(
    loop: asyncio.AbstractEventLoop, works: Iterator[Coroutine[Any, Any, None]]
) -> Generator[None]:
    """Run some coroutines on an event loop in another thread; none runs any more afterwards."""

    async def start() -> list[asyncio.Task[None]]:
        return [asyncio.create_task(work) for work in works]

    async def stop(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    tasks = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stop(tasks), loop).result()
