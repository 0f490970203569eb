"""How often to save: the formulas, and what they promise against failures thrown at random."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint import Costs, PhaseCost, PhaseSummary, advise
from dtckpt.checkpoint.timing.advice import daly_interval, goodput_of

SECONDS = st.floats(0.01, 1e4)


def simulated(
    interval: float, cost: float, lag: float, mtbf: float, restart: float, seed: int
) -> tuple[float, float]:
    """Run a job through failures; return the share of time that counts, and its uncertainty.

    Walks through restarts, training, stalls and the end of saves one after the other, as a job
    does; knows nothing of series or of exponentials but the times of the failures.
    """
    dice = random.Random(seed)
    lives = 4000
    useful: list[float] = []
    for _ in range(lives):
        end = dice.expovariate(1 / mtbf)
        now, trained, durable = restart, 0.0, 0.0
        pending: list[tuple[float, float]] = []
        while now <= end:
            now += interval + cost
            trained += interval
            pending.append((now + lag, trained))
        for when, what in pending:
            if when <= end:
                durable = what
        useful.append(durable)
    mean = sum(useful) / lives
    spread = math.sqrt(sum((one - mean) ** 2 for one in useful) / lives)
    return mean / mtbf, spread / math.sqrt(lives) / mtbf


@pytest.mark.parametrize(
    ("interval", "cost", "lag", "mtbf", "restart"),
    [
        (600.0, 60.0, 0.0, 3600.0, 120.0),  # a save that is waited for
        (600.0, 2.0, 300.0, 3600.0, 120.0),  # one in the background, long under way
        (240.0, 2.0, 240.0, 1800.0, 0.0),
        (3600.0, 5.0, 5.0, 1800.0, 60.0),  # failures come more often than saves
    ],
)
def test_goodput_is_that_of_a_simulated_job(
    interval: float, cost: float, lag: float, mtbf: float, restart: float
) -> None:
    expected = goodput_of(interval, cost, lag, mtbf, restart)
    found, uncertainty = simulated(interval, cost, lag, mtbf, restart, seed=7)
    assert abs(found - expected) < 4 * uncertainty
    assert uncertainty < 0.02  # else the line above says nothing


@given(cost=st.floats(0.01, 300.0), mtbf=st.floats(600.0, 1e6))
def test_no_interval_is_much_better_than_dalys(cost: float, mtbf: float) -> None:
    best = daly_interval(cost, mtbf)
    reached = goodput_of(best, cost, 0.0, mtbf, 0.0)
    for factor in (0.2, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 5.0):
        assert goodput_of(best * factor, cost, 0.0, mtbf, 0.0) <= reached + 2e-3


def test_daly_becomes_young_where_saves_are_cheap() -> None:
    assert daly_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert daly_interval(10.0, 5.0) == 5.0  # beyond its range: by Daly's own rule


@given(stall=SECONDS, more=SECONDS, mtbf=SECONDS, step=SECONDS, slowdown=st.floats(0, 0.9))
def test_what_is_advised_can_be_done(
    stall: float, more: float, mtbf: float, step: float, slowdown: float
) -> None:
    advice = advise(
        stall_seconds=stall,
        save_seconds=stall + more,
        mean_time_between_failures=mtbf,
        step_seconds=step,
        slowdown=slowdown,
    )
    steps = advice.interval_steps
    assert steps is not None
    assert steps >= 1
    assert advice.interval_seconds == steps * step
    assert advice.interval_seconds >= advice.least_seconds * (1 - 1e-6)
    assert 0 <= advice.goodput <= 1
    intervals = [one.interval_seconds for one in advice.alternatives]
    assert advice.interval_seconds in intervals
    assert intervals == sorted(set(intervals))
    assert all(len(line) <= 80 for line in str(advice).splitlines())


def test_a_save_that_takes_long_bounds_the_interval() -> None:
    quick = advise(stall_seconds=0.1, save_seconds=5, mean_time_between_failures=3600)
    slow = advise(stall_seconds=0.1, save_seconds=300, mean_time_between_failures=3600)
    assert quick.interval_seconds == pytest.approx(quick.daly_seconds)
    assert slow.interval_seconds == pytest.approx(299.9)
    assert slow.daly_seconds == quick.daly_seconds
    assert slow.goodput < quick.goodput


def costs(kind: Any = "save") -> Costs:
    queue = PhaseSummary(
        phase="queue",
        num_ranks=2,
        min_seconds=0.0,
        median_seconds=5.0,
        max_seconds=10.0,
        total_bytes=0,
        slowest_rank=1,
        slowest_host="b",
    )
    return Costs(
        kind=kind,
        url="runs/a",
        rank=0,
        host="a",
        num_ranks=2,
        started_at=0.0,
        seconds=40.0,
        stall_seconds=12.0,
        phases=(PhaseCost(phase="plan", seconds=2.0, waited_seconds=10.0),),
        spans=(),
        summary=(queue,),
    )


def test_the_wait_for_the_save_before_is_no_cost_of_this_one() -> None:
    advice = advise(costs(), mean_time_between_failures=3600)
    assert advice.cost_seconds == 2.0
    assert advice.least_seconds == 28.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"save_seconds": 1.0}, "needs the costs of a save"),
        ({"costs": costs(), "stall_seconds": 1.0}, "not both"),
        ({"costs": costs("load")}, "those of a load"),
        ({"stall_seconds": -1.0, "save_seconds": 1.0}, "stall_seconds is a number from 0 on"),
        ({"stall_seconds": 2.0, "save_seconds": 1.0}, "part of the save"),
        ({"stall_seconds": 0.0, "save_seconds": 0.0}, "save_seconds is a number above 0"),
        ({"stall_seconds": 0.0, "save_seconds": math.nan}, "save_seconds"),
        ({"stall_seconds": 0.0, "save_seconds": 1.0, "step_seconds": 0.0}, "step_seconds"),
        ({"stall_seconds": 0.0, "save_seconds": 1.0, "slowdown": 1.0}, "a share below 1"),
        (
            {"stall_seconds": 0.0, "save_seconds": 1.0, "mean_time_between_failures": math.inf},
            "mean_time_between_failures",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    numbers: dict[str, Any] = {"mean_time_between_failures": 3600.0, **given}
    with pytest.raises(ValueError, match=message):
        advise(**numbers)
