"""Systems side by side: one warm-up each, then rounds in rotating order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from .probe import Cost, measure, tidy
from .row import Outcome
from .team import Team
from .timing import Call, seconds_of, turns, undisturbed

_WARM_UPS = 2
"""Of races."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One system in a contest; every rank calls the same functions in the same order."""

    name: str
    call: Callable[[], object]
    """What is measured."""
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    max_rounds: int | None = None
    """Fewer rounds, for a system that is slow."""


def compete(
    team: Team,
    contestants: Sequence[Contestant],
    rounds: int,
    *,
    warm_up: bool = True,
    skipped: Mapping[str, str] | None = None,
) -> Outcome:
    """Measure all contestants on all ranks; one that raises is skipped from then on.

    A round's ``seconds`` and memory are those of the worst rank, ``cpu_seconds`` and
    ``read_bytes`` the sum over ranks. Calls start behind a barrier. ``skipped`` are systems that
    take no part, with the reasons.
    """
    outcome = Outcome(skipped=dict(skipped or {}))
    for turn, one in turns(contestants, rounds, int(warm_up)):
        if one.name in outcome.skipped or turn >= (one.max_rounds or rounds):
            continue
        told = team.gather(_attempt(team, one))
        reason = _first(told)
        if reason is not None:
            outcome.skipped[one.name] = reason
            outcome.values.pop(one.name, None)
            team.say(f"  {one.name} {reason}")
        elif turn >= 0:
            costs = [cost for cost in told if isinstance(cost, Cost)]
            values = outcome.values.setdefault(one.name, {})
            for metric, value in _joined(costs).items():
                values.setdefault(metric, []).append(value)
    return outcome


def race(
    team: Team, calls: Mapping[str, Call], rounds: int, in_a_row: int
) -> dict[str, list[float]]:
    """Return the seconds of one of ``in_a_row`` calls, by system and round, of the slowest rank.

    As :func:`compete`, for calls that are too short for the rest of it, and that do not fail.
    """
    own: dict[str, list[float]] = {name: [] for name in calls}
    with undisturbed():
        for turn, name in turns(list(calls), rounds, _WARM_UPS):
            team.barrier()
            seconds = seconds_of(calls[name], in_a_row, time.perf_counter)
            if turn >= 0:
                own[name].append(seconds)
    told = team.gather(own)
    return {name: [max(r) for r in zip(*(one[name] for one in told), strict=True)] for name in own}


def prepare(team: Team, steps: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Call what every system needs beforehand; return the systems that raised, and what."""
    failed: dict[str, str] = {}
    for name, step in steps.items():
        reason = _first(team.gather(_failure(step)))
        if reason is not None:
            failed[name] = reason
            team.say(f"  {name} {reason}")
    return failed


def _failure(step: Callable[[], object]) -> str | None:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _first(told: Sequence[object]) -> str | None:
    """Return what the first rank that failed said."""
    failed = [(rank, text) for rank, text in enumerate(told) if isinstance(text, str)]
    return f"failed on rank {failed[0][0]}: {failed[0][1]}" if failed else None


def _attempt(team: Team, one: Contestant) -> Cost | str:
    try:
        one.before()
        tidy()
        team.barrier()
        cost = measure(one.call)
        one.after()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return cost


def _joined(costs: list[Cost]) -> dict[str, float]:
    sums = {"cpu_seconds", "read_bytes"}
    by_metric = {name: [asdict(cost)[name] for cost in costs] for name in asdict(costs[0])}
    return {
        name: float(sum(found) if name in sums else max(found)) for name, found in by_metric.items()
    }
