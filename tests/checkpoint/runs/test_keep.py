"""What stays of a run: the rules, alone and together, and what nothing may take away."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint import Best, Keep
from dtckpt.checkpoint.runs.keep import KnownStep, surplus


def known(number: int, **rest: object) -> KnownStep:
    return KnownStep(number=number, name=f"step-{number}", **{"saved_at": 60.0 * number, **rest})  # pyright: ignore[reportArgumentType]


def kept(steps: list[KnownStep], keep: Keep, now: float = 600.0) -> list[int]:
    gone = surplus(steps, keep, now=now).free
    return [step.number for step in steps if step.name not in gone]


TEN = [known(number) for number in range(1, 11)]


def test_everything_stays_where_nothing_is_said() -> None:
    assert kept(TEN, Keep()) == list(range(1, 11))


def test_each_rule_keeps_what_it_asks_for() -> None:
    assert kept(TEN, Keep(last=3)) == [8, 9, 10]
    assert kept(TEN, Keep(every=4)) == [4, 8, 10]
    assert kept(TEN, Keep(younger_than=timedelta(minutes=3))) == [8, 9, 10]
    assert kept(TEN, Keep(last=1, every=5)) == [5, 10]


def test_the_best_by_a_metric() -> None:
    losses = [5.0, 3.0, math.nan, 3.0, 4.0]
    steps = [known(n, metrics={"loss": loss}) for n, loss in enumerate(losses)] + [known(9)]
    assert kept(steps, Keep(best=Best(metric="loss"))) == [3, 9]
    assert kept(steps, Keep(best=Best(metric="loss", count=3))) == [1, 3, 4, 9]
    assert kept(steps, Keep(best=Best(metric="loss", mode="max"))) == [0, 9]
    assert Best(metric="none").of(steps) == []


def test_pins_bases_and_what_was_abandoned() -> None:
    steps = [
        known(1),
        known(2, is_pinned=True, bases=frozenset({"step-1"})),
        known(3, bases=frozenset({"step-1"})),
        known(4),
        known(7, is_abandoned=True),
        known(8, is_abandoned=True, is_pinned=True),
        known(5),
    ]
    choice = surplus(steps, Keep(last=1), now=0)
    assert choice.free == ("step-7", "step-4", "step-3")
    assert choice.lent == {"step-1": ("step-2",)}


def test_what_was_abandoned_stays_until_something_follows() -> None:
    steps = [known(1, is_abandoned=True), known(2, is_abandoned=True)]
    assert kept(steps, Keep(last=1)) == [1, 2]
    assert kept([*steps, known(1)], Keep(last=1))[-1] == 1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Keep(last=0), "last=.*above 0, got 0"),
        (lambda: Keep(every=-1), "every=.*above 0, got -1"),
        (lambda: Best(metric="loss", mode="least"), "'min' or 'max', got 'least'"),  # pyright: ignore[reportArgumentType]
        (lambda: Best(metric="loss", count=0), "count=0"),
    ],
)
def test_impossible_rules_are_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # pyright: ignore[reportCallIssue]


@given(
    st.lists(
        st.builds(
            KnownStep,
            number=st.integers(0, 8),
            name=st.sampled_from([f"s{n}" for n in range(12)]),
            saved_at=st.floats(0, 100),
            metrics=st.dictionaries(st.sampled_from(["a", "b"]), st.floats()),
            bases=st.frozensets(st.sampled_from([f"s{n}" for n in range(12)]), max_size=2),
            is_pinned=st.booleans(),
            is_abandoned=st.booleans(),
        ),
        unique_by=lambda step: step.name,
    ),
    st.builds(
        Keep,
        last=st.none() | st.integers(1, 3),
        every=st.none() | st.integers(1, 3),
        best=st.none() | st.builds(Best, metric=st.just("a"), count=st.integers(1, 2)),
    ),
)
def test_never_the_newest_a_pinned_one_or_one_that_is_needed(
    steps: list[KnownStep], keep: Keep
) -> None:
    choice = surplus(steps, keep, now=200)
    gone = set(choice.free)
    stay = [step for step in steps if step.name not in gone]
    assert gone <= {step.name for step in steps}
    assert not any(step.is_pinned and step.name in gone for step in steps)
    assert not gone & {base for step in stay if step.name not in choice.lent for base in step.bases}
    line = [step for step in steps if not step.is_abandoned]
    if line:
        assert any(step.number == max(s.number for s in line) for step in stay)
    else:
        assert not gone
