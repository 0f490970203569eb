"""A round of a load that ranks make anyway, with their numbers on board."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..ranks.together import Answers, Decide, Ranks, nothing, together
from .recorder import Recorder, Told, with_entry, without_entry


def last_round(
    ranks: Ranks,
    recorder: Recorder,
    phase: str,
    body: Callable[[], bytes],
    decide: Decide = nothing,
    *,
    touched: Callable[[], Iterable[str]] | None = None,
    give_up: Callable[[], None] | None = None,
) -> bytes:
    """Do what ``together`` does, and let every rank learn what all have recorded by then."""

    def tell() -> bytes:
        answer = body()
        return with_entry(recorder.entry(), answer)

    def sum_up(answers: Answers) -> bytes:
        told: dict[int, Told] = {}
        given: dict[int, bytes] = {}
        for rank, answer in answers.items():
            told[rank], given[rank] = without_entry(answer)
        decision = decide(given)
        return with_entry(recorder.summarize(told), decision)

    agreed = together(ranks, phase, tell, sum_up, touched=touched, give_up=give_up)
    summary, decision = without_entry(agreed)
    recorder.learn(summary)
    return decision
