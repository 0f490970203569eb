"""One save or load over a group: its number, what has been heard of it, and who is lost."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .link import Link

Refuse = Callable[[str], bytes]
"""Makes the answer that counts for a rank which calls something else."""


def target_number(purpose: str, target: str) -> int:
    """Return a number for what a call is made for, 0 where no target is named.

    Two calls with the same number have the same purpose and target.

    >>> target_number("save", "run/step_7") == target_number("load", "run/step_7")
    False
    """
    if not target:
        return 0
    digest = hashlib.blake2b(f"{purpose}\0{target}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") or 1


class CallNumbers:
    """Numbers the saves and loads that this rank makes over a group, the same on all its ranks."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def enter(self) -> int:
        """Return the number of a call that begins; whether it fails or not, it has been one."""
        with self._lock:
            number = self._next
            self._next += 1
        return number

    def skip_to(self, number: int) -> None:
        """Give no number below this one any more."""
        with self._lock:
            self._next = max(self._next, number)


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of life that this rank shows during a call."""

    seconds: float
    """How often."""
    ask: Callable[[], tuple[float, str] | None]
    """How long ago this rank's work has got on, and what it is; None to show no sign of life."""


@dataclass(slots=True)
class Call:
    """What has been heard of one save or load."""

    number: int
    purpose: str
    signs: Signs
    refuse: Refuse = lambda _: b""
    target: int = 0
    """What it is made for, by `target_number`."""
    next_call: int = 0
    """The number of the call after it, where some rank has numbered this one otherwise."""
    begun: float = 0.0
    sign_at: float = 0.0
    awaited: set[int] = field(default_factory=set[int])
    """Members that have not come to it and still may."""
    strayed: set[int] = field(default_factory=set[int])
    """Members that have left it already, or are at another call."""
    links: dict[int, Link] = field(default_factory=dict[int, Link])
    rounds: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])
    heard: dict[int, float] = field(default_factory=dict[int, float])
    """When the work of a peer has got on last, as far as it has told."""
    seen: dict[int, float] = field(default_factory=dict[int, float])
    """When anything came from it."""
    doing: dict[int, str] = field(default_factory=dict[int, str])
    gone: dict[int, str] = field(default_factory=dict[int, str])
    """Whose connection has ended, or who has left, and why."""


@dataclass(slots=True)
class Waiting:
    """For how long the others are waited for, in seconds."""

    start: float
    timeout: float
    asleep: float = 0.0
    """How long this process was stopped meanwhile, or had no processor."""

    def limit(self, heard: float) -> float:
        """Return when a rank is given up that was heard of last at some time."""
        return max(self.start, heard) + self.timeout + self.asleep


def lost_of(
    held: Call, pending: Iterable[int], waiting: Waiting, now: float, wake: float
) -> tuple[dict[int, str], float]:
    """Return who is lost, and when to look again."""
    lost: dict[int, str] = {}
    first = waiting.limit(waiting.start)
    if not held.gone and now < first:
        return lost, min(wake, first)  # nobody can be; there may be thousands
    for rank in pending:
        limit = waiting.limit(held.heard.get(rank, waiting.start))
        if rank in held.gone:
            lost[rank] = held.gone[rank]
        elif now >= limit:
            lost[rank] = _why_lost(held, rank, waiting.timeout, now)
        else:
            wake = min(wake, limit)
    return lost, wake


def _why_lost(held: Call, rank: int, timeout: float, now: float) -> str:
    if rank not in held.seen:
        at = held.purpose or "call"
        return (
            f"it showed no sign of life within {timeout:g} s: it has not come to this {at}. All "
            "ranks make the same calls in the same order"
        )
    doing = held.doing.get(rank, "")
    if now - held.seen[rank] < timeout / 2:
        return f"it lives, but has not got on within {timeout:g} s: {doing or 'it does not say'}"
    at = f"; it was last heard of at {doing}" if doing else ""
    return f"it showed no sign of life within {timeout:g} s{at}"
