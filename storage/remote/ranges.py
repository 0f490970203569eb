"""Ranges of an object in few requests: neighbours are asked for together.

Pure planning and copying; ``fetching`` makes the requests. A request that is answered after
``LATENCY`` could have brought ``LATENCY * BANDWIDTH`` bytes meanwhile, so gaps that are smaller are
read over. Which numbers these are is said here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..base import ReadRequest

LATENCY = 0.020
"""Seconds until a request is answered, as object stores do it."""
BANDWIDTH = 100e6
"""Bytes a second of one connection to them."""
REQUEST_BYTES = 1 << 20
"""What a request costs, in bytes: half of ``LATENCY * BANDWIDTH``, since connections share a
network. Gaps up to this are read over."""
FETCH_BYTES = 16 << 20
"""Most bytes of one request, beside which its latency is a tenth."""


@dataclass(slots=True)
class Fetch:
    """One request: some ranges that lie near each other, and what is between them."""

    start: int
    stop: int
    parts: list[tuple[int, memoryview, ReadRequest]] = field(
        default_factory=list[tuple[int, memoryview, ReadRequest]]
    )
    """Where bytes go, by their first one."""
    position: int = 0
    """The next byte that is to arrive; all before it are where they belong."""
    first: int = 0
    """The number of the first part that is not full."""

    def take(self, data: memoryview, copied: Callable[[ReadRequest, int], None]) -> None:
        """Copy the bytes at ``position`` to where they go; ``copied`` is told how many are whose.

        ``ValueError`` if they are more than are left.
        """
        begin, end = self.position, self.position + len(data)
        if end > self.stop:
            raise ValueError(f"{end - self.stop} bytes more than asked for")
        for number in range(self.first, len(self.parts)):
            start, view, request = self.parts[number]
            if start >= end:
                break
            low, high = max(start, begin), min(start + len(view), end)
            if low < high:
                view[low - start : high - start] = data[low - begin : high - begin]
                copied(request, high - low)
            if number == self.first and start + len(view) <= end:
                self.first += 1
        self.position = end


def plan_fetches(requests: Sequence[ReadRequest]) -> list[Fetch]:
    """Return as few fetches as bring all that is requested, by their first byte."""
    pieces = [
        (request.offset + low, request.view[low : low + FETCH_BYTES], request)
        for request in requests
        for low in range(0, request.view.nbytes, FETCH_BYTES)
    ]
    fetches: list[Fetch] = []
    for piece in sorted(pieces, key=lambda piece: piece[0]):
        start, stop = piece[0], piece[0] + len(piece[1])
        last = fetches[-1] if fetches else None
        if last is None or not _joins(last, start, stop):
            last = Fetch(start, stop, position=start)
            fetches.append(last)
        last.parts.append(piece)
        last.stop = max(last.stop, stop)
    return fetches


def _joins(fetch: Fetch, start: int, stop: int) -> bool:
    """Whether a range behind the start of a fetch is better brought by it."""
    return start - fetch.stop <= REQUEST_BYTES and stop - fetch.start <= FETCH_BYTES
