"""Ranges that are read by threads: what one of them ends with is not held up by the others."""

from __future__ import annotations

import threading

import pytest

from dtckpt.storage.base import ReadRequest
from dtckpt.storage.remote.obstore.reads import NUM_FETCHES, read_each
from dtckpt.storage.remote.ranges import FETCH_BYTES

NUM_RANGES = NUM_FETCHES + 2


def requests() -> list[ReadRequest]:
    step = 2 * FETCH_BYTES
    return [ReadRequest(number * step, bytearray(1)) for number in range(NUM_RANGES)]


def test_a_failure_is_told_while_others_are_silent() -> None:
    told = threading.Event()
    is_told: list[bool] = []

    def get(start: int, stop: int) -> memoryview:
        if start == 0:
            raise PermissionError
        is_told.append(told.wait(20))
        return memoryview(bytes(stop - start))

    with pytest.raises(PermissionError):
        list(read_each(get, requests()))
    told.set()
    assert False not in is_told


def test_nothing_more_is_asked_for_after_the_end() -> None:
    asked: list[int] = []
    ended = threading.Event()
    before = set(threading.enumerate())

    def get(start: int, stop: int) -> memoryview:
        asked.append(start)
        if start:
            ended.wait(20)
        return memoryview(b"1" * (stop - start))

    reading = read_each(get, requests())
    first = next(iter(reading))
    assert bytes(first.view) == b"1"
    first.view[:] = b"2"
    reading.close()  # pyright: ignore[reportAttributeAccessIssue]
    ended.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
    assert len(asked) <= NUM_FETCHES
    assert bytes(first.view) == b"2"
