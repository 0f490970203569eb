"""Ranges of an object, several on their way at a time, by plain threads: obstore's fastest way."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ...base import ReadRequest
from ..ranges import Fetch, plan_fetches

NUM_FETCHES = 8
"""Requests on their way at a time, of one call; what they bring is held until it is whole."""

Get = Callable[[int, int], memoryview]
"""Called with the range to read; returns as many bytes as there are of it, from its start on."""


class ShortRead(Exception):
    """An object has fewer bytes than were asked for."""


def read_each(get: Get, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
    """Fill the buffers of all requests by ``get``, and yield each that is full.

    When this ends, or is closed, no buffer is touched any more. Raises what ``get`` raises, and
    ``ShortRead``.
    """
    left = Counter({request: request.view.nbytes for request in requests})
    full: list[ReadRequest] = [request for request, num_bytes in left.items() if not num_bytes]

    def copied(request: ReadRequest, num_bytes: int) -> None:
        left[request] -= num_bytes
        if not left[request]:
            full.append(request)

    yield from full
    full.clear()
    for fetch, data in _fetched(get, plan_fetches(requests)):
        fetch.take(data, copied)
        if fetch.position != fetch.stop:
            raise ShortRead(f"bytes {fetch.start}:{fetch.stop} end at {fetch.position}")
        yield from full
        full.clear()


def _fetched(get: Get, fetches: Sequence[Fetch]) -> Iterator[tuple[Fetch, memoryview]]:
    """Yield fetches as their bytes come."""
    if len(fetches) == 1:
        yield fetches[0], get(fetches[0].start, fetches[0].stop)
        return
    todo = iter(fetches)
    lock = threading.Lock()
    ended = threading.Event()
    room = threading.Semaphore(NUM_FETCHES)
    found: queue.SimpleQueue[tuple[Fetch, memoryview] | BaseException] = queue.SimpleQueue()

    def work() -> None:
        while True:
            room.acquire()
            with lock:
                fetch = None if ended.is_set() else next(todo, None)
            if fetch is None:
                return
            try:
                found.put((fetch, get(fetch.start, fetch.stop)))
            except BaseException as error:  # it must reach the reader, whatever it is
                found.put(error)
                return

    threads = _started(work, min(NUM_FETCHES, len(fetches)))
    try:
        for fetch in fetches if not threads else ():
            yield fetch, get(fetch.start, fetch.stop)
        for _ in fetches if threads else ():
            one = found.get()
            if isinstance(one, BaseException):
                raise one
            yield one
            room.release()
    finally:
        # Nobody waits for those that are still on their way: what they bring goes into no buffer.
        ended.set()
        for _ in threads:
            room.release()


def _started(work: Callable[[], None], number: int) -> list[threading.Thread]:
    threads: list[threading.Thread] = []
    for _ in range(number):
        thread = threading.Thread(target=work, name="dtckpt-fetch", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # an interpreter that is ending starts no threads
            break
        threads.append(thread)
    return threads
