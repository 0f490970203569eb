"""The last save of a process that is about to be ended: what is done in the time that is left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

from dtckpt.errors import Timeout

from ..agreement.gate import Agreed
from ..ranks.together import Answers, Ranks, together
from ..saving.background import SaveHandle
from ..saving.finishing import SaveReport

Way = Literal["wait", "supersede", "finish"]
"""What becomes of a save under way: another one follows it, or takes its place, or does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emergency:
    """How a save is made that a signal to stop asks for.

    It is waited for until it is committed in the first place, or called off at the deadline. What
    follows goes on in the background: with tiers it is brought on to the others and to the root for
    as long as the process lives. ``close`` waits for that without a deadline, and for what else is
    to be done, such as deletions, until the deadline. A process that is killed then leaves it whole
    in the first tier.
    """

    deadline: timedelta = timedelta(seconds=25)
    """From the first arrival of the signal on any rank until the save is over, or called off.

    ``torchrun`` kills its processes 30 seconds after it has passed on a signal, as Kubernetes does.
    """
    margin: float = 1.5
    """How much longer than the save under way has taken so far a new one may take."""

    def __post_init__(self) -> None:
        if not self.deadline > timedelta(0):
            raise ValueError(f"deadline is a datetime.timedelta above zero, got {self.deadline!r}")
        if not self.margin >= 1:
            raise ValueError(f"margin is a factor of 1 or more, got {self.margin!r}")


@dataclass(frozen=True, slots=True)
class UnderWay:
    """How far one rank is with its part of a save."""

    seconds: float
    """Since it has begun."""
    written_bytes: int
    total_bytes: int

    def expected(self) -> tuple[float, float]:
        """Return in how many seconds it may be over, and how many such a save takes in all."""
        if self.written_bytes >= self.total_bytes:
            return 0.0, self.seconds
        if not self.written_bytes:  # nothing is known but that it takes longer than so far
            return float("inf"), float("inf")
        whole = self.seconds * self.total_bytes / self.written_bytes
        return whole - self.seconds, whole


def way_for(ranks: Iterable[UnderWay], seconds_left: float, margin: float) -> Way:
    """Return what to do with a save under way, from how far all ranks are with it.

    A new one holds later steps, but is worth nothing if it does not end in time:

    >>> half = UnderWay(seconds=4.0, written_bytes=50, total_bytes=100)
    >>> [way_for([half], left, 1.5) for left in (25.0, 12.0, 7.0)]
    ['wait', 'supersede', 'finish']
    """
    expected = [rank.expected() for rank in ranks]
    rest = max((rest for rest, _ in expected), default=0.0)
    whole = max((whole for _, whole in expected), default=0.0)
    if margin * rest + whole <= seconds_left:
        return "wait"  # what is nearly safe is made safe first
    if margin * whole <= seconds_left or whole == float("inf"):
        return "supersede"  # one that has written nothing is not nearer to its end than a new one
    return "finish"


def agree_on_way(
    ranks: Ranks, handle: SaveHandle | None, begun: float, agreed: Agreed, emergency: Emergency
) -> Way:
    """Return the same way on all ranks, who call this at the agreed call.

    ``handle`` is the last save in the background, if any, and ``begun`` when it began, by
    ``time.monotonic()``.
    """

    def tell() -> bytes:
        if handle is None or handle.done():
            return b"null"
        progress = handle.progress()
        seconds = time.monotonic() - begun
        return json.dumps([seconds, progress.written_bytes, progress.total_bytes]).encode()

    def choose(answers: Answers) -> bytes:
        told = [json.loads(answer) for answer in answers.values()]
        left = agreed.seconds_left()
        if left is None:
            return b"wait"
        return way_for([UnderWay(*each) for each in told if each], left, emergency.margin).encode()

    return cast(Way, together(ranks, "emergency: look", tell, choose).decode())


def report_in_time(handle: SaveHandle, agreed: Agreed) -> SaveReport:
    """Return the report of a save once it is durable; call it off when its time is over.

    Raises Timeout then, and else what the save failed with. Nothing is half committed: the save may
    still have been complete at the last moment, or what was there before stands.
    """
    try:
        return handle.result(agreed.seconds_left())
    except Timeout:
        handle.at_exit = "abort"
        handle.cancel()
        progress = handle.progress()
        raise Timeout(
            f"{handle.url}: the time for this save ({agreed}) is over, and it is called off: this "
            f"rank has written {progress.written_bytes} of {progress.total_bytes} bytes. The "
            "checkpoints before it stand"
        ) from None
