"""How often to save: what saves cost against what failures take away.

A job computes for ``interval`` seconds, then a save holds it up for ``cost`` seconds, and so on. A
checkpoint counts from when it is durable, which in the background is ``lag`` seconds after the
training goes on. Failures come at random, ``mtbf`` seconds apart on average; a failed job starts
again in ``restart`` seconds, if nothing fails meanwhile, from the newest durable checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .costs import Costs
from .texts import duration, table

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What would come of another interval."""

    interval_seconds: float
    """Of training between two saves."""
    interval_steps: int | None
    """The same in steps, if it is known how long one takes."""
    goodput: float
    """Share of all time that is training which no failure takes away."""
    saving: float
    """Share of the time between failures that saves take from the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How often to save, and what comes of it. ``print`` shows it with alternatives."""

    interval_seconds: float
    """Of training between two saves."""
    interval_steps: int | None
    """The same in steps, for ``EverySteps``; None where it is not known how long one takes."""
    goodput: float
    """Share of all time that is training which no failure takes away."""
    young_seconds: float
    """The interval by Young's first-order formula."""
    daly_seconds: float
    """The interval by Daly's higher-order formula."""
    least_seconds: float
    """The shortest interval there can be: one save is under way at a time."""
    cost_seconds: float
    """What a save takes from the training: the stall, and what it slows down afterwards."""
    mean_time_between_failures: float
    alternatives: tuple[Alternative, ...]
    """Shorter and longer intervals, the one that is advised among them, shortest first."""

    def __str__(self) -> str:
        steps = f" ({self.interval_steps:,} steps)" if self.interval_steps else ""
        head = [
            f"save every {duration(self.interval_seconds)}{steps}: goodput {self.goodput:.2%}",
            f"a save costs {duration(self.cost_seconds)} of training, failures come every "
            f"{duration(self.mean_time_between_failures)};",
            f"Daly {duration(self.daly_seconds)}, Young {duration(self.young_seconds)}, "
            f"not below {duration(self.least_seconds)}",
        ]
        rows = [("interval", "steps", "goodput", "in saves", "")]
        for one in self.alternatives:
            count = "" if one.interval_steps is None else f"{one.interval_steps:,}"
            is_advised = one.interval_seconds == self.interval_seconds
            shares = f"{one.goodput:.2%}", f"{one.saving:.2%}"
            row = (duration(one.interval_seconds), count, *shares, "<" if is_advised else "")
            rows.append(row)
        return "\n".join([*head, *table(rows)])


def advise(
    costs: Costs | None = None,
    *,
    mean_time_between_failures: float,
    stall_seconds: float | None = None,
    save_seconds: float | None = None,
    restart_seconds: float = 0.0,
    step_seconds: float | None = None,
    slowdown: float = 0.0,
) -> Advice:
    """Return how often to save so that most of the time is training which counts.

    ``costs`` of a save give ``stall_seconds``, how long it held the training up, and
    ``save_seconds``, from its call until it was durable (without what either waited for the save
    before); or both are given. ``mean_time_between_failures`` is that of the whole job, in seconds:
    that of one node over the number of nodes. ``restart_seconds`` is from a failure until the
    training goes on, load included. ``step_seconds``, of one step, makes the interval whole steps.
    ``slowdown`` is the share of its speed that the training loses while a save is in the
    background.

    The interval is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", Future Generation Computer Systems 22 (2006), with the cost of a save in
    place of its time: with cost ``d`` and MTBF ``M``, ``sqrt(2dM) (1 + sqrt(d/2M)/3 + (d/2M)/9) -
    d`` for ``d < 2M``, else ``M``. It refines ``sqrt(2dM)`` of J. W. Young, "A first order
    approximation to the optimum checkpoint interval", Communications of the ACM 17 (1974). Saves in
    the background cost little, so that it may be shorter than a save takes; one is under way at a
    time, and the interval is no shorter than that.

    ``goodput`` follows from failures that come independently of each other, with ``t`` the interval
    and ``lag`` how long a checkpoint is not durable after the training has gone on:
    ``t exp(-(restart + lag)/M) / (M (exp((t + d)/M) - 1))``. How long a save takes in the
    background thus costs goodput, and does not move the best interval.

    ValueError for numbers that cannot be.

    >>> advice = advise(stall_seconds=2, save_seconds=60, mean_time_between_failures=4 * 3600,
    ...     restart_seconds=300, step_seconds=5)
    >>> advice.interval_steps, round(advice.goodput, 3)
    (48, 0.959)
    >>> print(advice)
    save every 240 s (48 steps): goodput 95.93%
    a save costs 2.00 s of training, failures come every 4.00 h;
    Daly 239 s, Young 240 s, not below 58.0 s
    interval steps goodput in saves
    60.0 s      12  94.19%    3.23%
    120 s       24  95.54%    1.64%
    240 s       48  95.93%    0.83% <
    480 s       96  95.52%    0.41%
    960 s      192  94.13%    0.21%
    """
    stall, save = _measured(costs, stall_seconds, save_seconds)
    mtbf = mean_time_between_failures
    _check(stall, save, mtbf, restart_seconds, step_seconds, slowdown)
    lag = save - stall
    cost = stall + slowdown * lag
    model = _Model(cost=cost, lag=lag, mtbf=mtbf, restart=restart_seconds, step=step_seconds)
    young, daly = math.sqrt(2 * cost * mtbf), daly_interval(cost, mtbf)
    best = model.best_near(daly)
    others = {model.near(best * factor) for factor in _FACTORS}
    return Advice(
        interval_seconds=best,
        interval_steps=model.steps(best),
        goodput=model.goodput(best),
        young_seconds=young,
        daly_seconds=daly,
        least_seconds=lag,
        cost_seconds=cost,
        mean_time_between_failures=mtbf,
        alternatives=tuple(model.alternative(interval) for interval in sorted(others)),
    )


def daly_interval(cost: float, mtbf: float) -> float:
    """Return Daly's interval in seconds of training between two saves.

    >>> round(daly_interval(60, 3600)), daly_interval(60, 10)
    (618, 10)
    """
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def goodput_of(interval: float, cost: float, lag: float, mtbf: float, restart: float) -> float:
    """Return the share of all time that is training which counts; 0 where next to nothing does.

    Lives between failures are alike. Of one of ``x`` seconds the training up to the k-th checkpoint
    counts if ``x`` is at least ``restart + k (interval + cost) + lag``; the sum over all k of the
    probability of that is a geometric series.

    >>> round(goodput_of(240, 2, 58, 14400, 300), 4)
    0.9593
    """
    period = (interval + cost) / mtbf
    if period > 700:  # exp would overflow
        return 0.0
    return interval / mtbf * math.exp(-(restart + lag) / mtbf) / math.expm1(period)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    cost: float
    lag: float
    mtbf: float
    restart: float
    step: float | None

    def goodput(self, interval: float) -> float:
        return goodput_of(interval, self.cost, self.lag, self.mtbf, self.restart)

    def near(self, interval: float) -> float:
        """Return the nearest interval that is possible: no shorter than may be, in whole steps."""
        if self.step is None:
            return max(interval, self.lag)
        return max(round(interval / self.step), self._least_steps(self.step)) * self.step

    def best_near(self, interval: float) -> float:
        """Return the better one of those that are possible next to an interval."""
        if self.step is None:
            return self.near(interval)
        few = max(math.floor(interval / self.step), self._least_steps(self.step))
        return max((few * self.step, (few + 1) * self.step), key=self.goodput)

    def _least_steps(self, step: float) -> int:
        return max(math.ceil(self.lag / step - 1e-9), 1)

    def steps(self, interval: float) -> int | None:
        return None if self.step is None else round(interval / self.step)

    def alternative(self, interval: float) -> Alternative:
        return Alternative(
            interval_seconds=interval,
            interval_steps=self.steps(interval),
            goodput=self.goodput(interval),
            saving=self.cost / (interval + self.cost),
        )


def _measured(costs: Costs | None, stall: float | None, save: float | None) -> tuple[float, float]:
    if costs is not None:
        if costs.kind != "save":
            raise ValueError("advise() takes the costs of a save, got those of a load")
        if stall is not None or save is not None:
            raise ValueError("advise() takes costs, or stall_seconds and save_seconds, not both")
        queues = [phase.max_seconds for phase in costs.summary if phase.phase == "queue"]
        queue = min(max(queues, default=0.0), costs.stall_seconds)
        return costs.stall_seconds - queue, costs.seconds - queue
    if stall is None or save is None:
        raise ValueError("advise() needs the costs of a save, or stall_seconds and save_seconds")
    return stall, save


def _check(
    stall: float,
    save: float,
    mtbf: float,
    restart: float,
    step: float | None,
    slowdown: float,
) -> None:
    given = {"stall_seconds": stall, "restart_seconds": restart, "slowdown": slowdown}
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is a number from 0 on, got {value!r}")
    above = {"save_seconds": save, "mean_time_between_failures": mtbf}
    for name, value in above.items() if step is None else (above | {"step_seconds": step}).items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is a number above 0, got {value!r}")
    if stall > save:
        raise ValueError(
            f"the stall is part of the save: stall_seconds={stall!r}, save_seconds={save!r}"
        )
    if slowdown >= 1:
        raise ValueError(f"slowdown is a share below 1, got {slowdown!r}")
