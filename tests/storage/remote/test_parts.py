"""Memory of large objects that are sent in parts."""

from __future__ import annotations

import os
from typing import Any

from dtckpt.storage.remote.parts import Parts

PART = 1000


class Sink:
    """An upload that notes what it is given."""

    num_in_flight = 4

    def __init__(self) -> None:
        self.sent: dict[int, bytes] = {}
        self.memory: set[int] = set()
        self.kept: dict[int, memoryview] = {}

    def send(self, number: int, data: memoryview) -> Any:
        self.sent[number] = bytes(data)
        self.memory.add(id(data.obj))
        if number % 3 == 1:
            self.keep(number, data)
        return number

    def keep(self, number: int, data: memoryview) -> None:
        """What a connection does that has not sent all of a part yet."""

    def complete(self, parts: list[Any]) -> None:
        assert parts == sorted(self.sent)

    def abort(self) -> None:
        raise AssertionError("nothing is wrong")


def send(upload: Sink, data: bytes) -> None:
    """Send an object as savers do."""
    parts = Parts(upload, PART)
    for start in range(0, len(data), 300):
        parts.write(memoryview(data)[start : start + 300])
    parts.close()


def test_memory_of_parts_is_used_again() -> None:
    upload, data = Sink(), os.urandom(20 * PART + 1)
    send(upload, data)
    assert b"".join(upload.sent[number] for number in sorted(upload.sent)) == data
    assert len(upload.memory) <= upload.num_in_flight + 1


def test_memory_that_is_still_sent_of_is_left_alone() -> None:
    class Slow(Sink):
        def keep(self, number: int, data: memoryview) -> None:
            self.kept[number] = data

    upload, data = Slow(), os.urandom(20 * PART + 1)
    send(upload, data)
    assert b"".join(upload.sent[number] for number in sorted(upload.sent)) == data
    assert len(upload.kept) == 7
    assert {number: bytes(view) for number, view in upload.kept.items()} == {
        number: upload.sent[number] for number in upload.kept
    }
