"""Fetches of an object, several on their way at a time, told of as their buffers fill."""

from __future__ import annotations

import asyncio
import functools
import queue
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from ...base import ReadRequest
from ..asking import Attempts, Connection, is_on_loop
from ..ranges import REQUEST_BYTES, Fetch, plan_fetches
from .dialects.s3_reads import stream

NUM_FETCHES = 32
"""Requests that read and are on their way at a time, over all stores and threads of a process."""
NUM_LARGE = 16
"""How many of them may bring more than ``REQUEST_BYTES``.

What comes from S3 goes into its buffers as it arrives. What other drivers bring they hold until it
is whole, 272 MiB at most.
"""

# For the event loop of each process: fsspec makes a new one after a fork.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, asyncio.Semaphore]]
_slots = WeakKeyDictionary()


class ShortRead(Exception):
    """An object has fewer bytes than were asked for."""


def fetch_each(
    connection: Connection, path: str, where: str, requests: Sequence[ReadRequest]
) -> Iterator[ReadRequest]:
    """Fill the buffers of all requests, and yield each that is full while others arrive.

    When this ends, or is closed, no buffer is touched any more. Raises ``StorageError``, and
    ``ShortRead``.
    """
    fs = connection.fs
    left = Counter({request: request.view.nbytes for request in requests})
    full: queue.SimpleQueue[ReadRequest | BaseException] = queue.SimpleQueue()

    def copied(request: ReadRequest, num_bytes: int) -> None:
        left[request] -= num_bytes
        if not left[request]:
            full.put(request)

    empty = [request for request, num_bytes in left.items() if not num_bytes]
    num_waiting = len(left) - len(empty)
    fetches = plan_fetches(requests)

    async def fetch_once(fetch: Fetch, same: dict[str, str]) -> None:
        if hasattr(fs, "call_s3"):
            await stream(fs, path, fetch, copied, same)
        else:
            data = await fs._cat_file(path, start=fetch.start, end=fetch.stop)
            fetch.take(memoryview(data), copied)

    async def fill(fetch: Fetch) -> None:
        same: dict[str, str] = {}
        begun_at = fetch.position
        try:
            async with _slot(fs.loop, fetch):
                attempts = Attempts(connection, "read", where)
                while True:
                    try:
                        async with attempts.slot():
                            await fetch_once(fetch, same)
                        break
                    except Exception as error:
                        if fetch.position > begun_at:
                            attempts.progressed()
                            begun_at = fetch.position
                        pause = attempts.pause(error)
                        if fetch.position == fetch.stop:
                            break  # the reply broke off behind its last byte
                        await asyncio.sleep(pause)
                attempts.succeeded()
            _check_length(fetch)
        except BaseException as error:  # it must reach the reader, whatever it is
            full.put(error)

    yield from empty
    if not fs.async_impl:
        for fetch in fetches:
            read = functools.partial(fs.cat_file, path, start=fetch.start, end=fetch.stop)
            fetch.take(memoryview(connection.ask("read", where, read)), copied)
            _check_length(fetch)
            yield from _until_empty(full)
        return
    with _running(fs, map(fill, fetches)):
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


@asynccontextmanager
async def _slot(loop: asyncio.AbstractEventLoop, fetch: Fetch) -> AsyncGenerator[None]:
    """Wait until another fetch may be on its way, and let the next one be afterwards."""
    if loop not in _slots:
        _slots[loop] = asyncio.Semaphore(NUM_FETCHES), asyncio.Semaphore(NUM_LARGE)
    every, large = _slots[loop]
    async with large if fetch.stop - fetch.start > REQUEST_BYTES else nullcontext(), every:
        yield


@contextmanager
def _running(fs: Any, works: Iterator[Coroutine[Any, Any, None]]) -> Generator[None]:
    """Run some coroutines on the event loop of a driver, in another thread, during the block.

    The block may only end well once all have done what they are for; if it does not, none of them
    runs any more afterwards.
    """
    tasks: list[asyncio.Task[None]] = []

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop: asyncio.AbstractEventLoop = fs.loop
    loop.call_soon_threadsafe(lambda: tasks.extend(map(loop.create_task, works)))
    try:
        yield
    except BaseException:
        stopping = asyncio.run_coroutine_threadsafe(stop(), loop)
        # An interpreter that is ending has stopped the loop, too.
        if not is_on_loop(fs) and not sys.is_finalizing():
            stopping.result()
        raise
