"""What draws lines: functions by profile, in the order of which programs depend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..drawing import Draw

Produce = Callable[[Draw], str]


@dataclass(frozen=True, slots=True)
class Producer:
    """A kind of line: what draws one, the profile that asks for it, and how often it comes."""

    produce: Produce
    profile: str
    weight: float


PRODUCERS: list[Producer] = []


def producer(profile: str, weight: float) -> Callable[[Produce], Produce]:
    """Register a function that draws a line; Refused where there is nothing for it."""

    def register(produce: Produce) -> Produce:
        PRODUCERS.append(Producer(produce, profile, weight))
        return produce

    return register


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()
