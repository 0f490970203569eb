"""Recording what a save or load costs one rank, and telling all ranks of each other's numbers.

Nothing is done per tensor: a phase costs two looks at the clock, however much it holds. No round is
added either: numbers go along with the last answers that ranks give anyway (``entry``), the
coordinator sums them up, and the summary comes back with its decision.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..ranks.base import Ranks
from .costs import Costs, Kind, PhaseCost, PhaseSummary, Span, in_order

_MAX_SPANS = 256
"""A load may read and exchange in thousands of turns; the sums count all of them."""
_MAX_HOST = 253
"""Characters of a host's name, as in the DNS."""
_DIGITS = 6
"""Of seconds that are told."""

Told = Sequence[Any]
"""What ``entry`` returned on a rank, as JSON tells it."""


class Recorder:
    """What one rank does for one save or load. One thread at a time records."""

    def __init__(self, kind: Kind, ranks: Ranks) -> None:
        self._kind: Kind = kind
        self.ranks = ranks
        """Whose waiting is counted; who keeps the recorder for longer lets go of them."""
        self._began = time.perf_counter()
        self._began_at = time.time()
        self._stall: float | None = None
        self._sums: dict[str, list[float]] = {}
        """Seconds of work, seconds of waiting, bytes."""
        self._inner = (0.0, 0.0)
        """Seconds of phases within the one that goes on, and seconds of waiting in them."""
        self._spans: list[Span] = []
        self._summary: tuple[PhaseSummary, ...] = ()
        self.host = socket.gethostname()[:_MAX_HOST]

    @contextmanager
    def phase(self, name: str) -> Generator[_Open]:
        """Record the block as one stretch of a phase, also where it fails.

        Yields what takes the number of bytes. A phase within another one is not part of it.
        """
        opened = _Open()
        outer, self._inner = self._inner, (0.0, 0.0)
        waited, start = self.ranks.waited_seconds, time.perf_counter()
        try:
            yield opened
        finally:
            seconds = time.perf_counter() - start
            waited = self.ranks.waited_seconds - waited
            sums = self._sums.setdefault(name, [0.0, 0.0, 0])
            inner, waited_inside = self._inner
            sums[0] += max(seconds - inner - (waited - waited_inside), 0.0)
            sums[1] += waited - waited_inside
            sums[2] += opened.num_bytes
            self._inner = outer[0] + seconds, outer[1] + waited
            self._keep(name, start, seconds, opened.num_bytes)

    def part(self, name: str, seconds: float, num_bytes: int) -> None:
        """Record what has come in very many turns within the phase that goes on, and is none of it.

        Seconds are those of work alone.
        """
        sums = self._sums.setdefault(name, [0.0, 0.0, 0])
        sums[0] += seconds
        sums[2] += num_bytes
        self._inner = self._inner[0] + seconds, self._inner[1]

    def _keep(self, name: str, start: float, seconds: float, num_bytes: int) -> None:
        if len(self._spans) < _MAX_SPANS:
            span = Span(
                phase=name,
                started_at=self._began_at + start - self._began,
                seconds=seconds,
                num_bytes=num_bytes,
            )
            self._spans.append(span)

    def call_returns(self) -> None:
        """Note that the caller goes on, while the rest is done in the background."""
        self._stall = time.perf_counter() - self._began

    def entry(self) -> Told:
        """Return what this rank tells of itself: host, and seconds and bytes of each phase."""
        sums = {n: [round(s[0], _DIGITS), s[2]] for n, s in self._sums.items()}
        return [self.host, sums]

    def summarize(self, told: Mapping[int, Told]) -> list[Any]:
        """Return JSON of the summary of what ranks have told; on the coordinator.

        Of itself it knows more by now than what it has told.
        """
        told = {**told, self.ranks.rank: self.entry()}
        names = in_order(self._kind, (name for _, sums in told.values() for name in sums))
        return [_summary(name, told) for name in names]

    def learn(self, summary: Iterable[Any]) -> None:
        """Take the summary that the coordinator has told."""
        self._summary = tuple(
            PhaseSummary(
                phase=name,
                num_ranks=count,
                min_seconds=low,
                median_seconds=middle,
                max_seconds=high,
                total_bytes=total,
                slowest_rank=rank,
                slowest_host=host,
            )
            for name, count, low, middle, high, total, rank, host in summary
        )

    def costs(self, url: str) -> Costs:
        """Return all that is known at the end of the save or load."""
        seconds = time.perf_counter() - self._began
        phases = (
            PhaseCost(
                phase=name,
                seconds=self._sums[name][0],
                waited_seconds=self._sums[name][1],
                num_bytes=int(self._sums[name][2]),
            )
            for name in in_order(self._kind, self._sums)
        )
        return Costs(
            kind=self._kind,
            url=url,
            rank=self.ranks.rank,
            host=self.host,
            num_ranks=len(self.ranks.all),
            started_at=self._began_at,
            seconds=seconds,
            stall_seconds=seconds if self._stall is None else self._stall,
            phases=tuple(phases),
            spans=tuple(self._spans),
            summary=self._summary,
        )


class _Open:
    """A stretch of a phase that goes on."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


def _summary(name: str, told: Mapping[int, Told]) -> list[Any]:
    took = sorted((sums[name][0], rank) for rank, (_, sums) in told.items() if name in sums)
    seconds = [one for one, _ in took]
    high = seconds[-1]
    slowest = next(rank for one, rank in took if one == high)
    half = len(seconds) // 2
    middle = (seconds[half] + seconds[~half]) / 2
    total = sum(int(sums[name][1]) for _, sums in told.values() if name in sums)
    return [name, len(took), seconds[0], middle, high, total, slowest, told[slowest][0]]


def with_entry(entry: Told, answer: bytes) -> bytes:
    """Return an answer with what a rank tells of itself in front."""
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n" + answer


def without_entry(told: bytes) -> tuple[Any, bytes]:
    """Return the two parts of what ``with_entry`` has made."""
    entry, _, answer = told.partition(b"\n")
    return json.loads(entry), answer
