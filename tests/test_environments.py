"""What CI tests with each commit: environments in turn, within a budget of time."""

from __future__ import annotations

import re

from .adapters import ADAPTERS
from .environments import PER_TURN, ROOT, names_of_turn
from .matrix import PAIRS


def test_turns_that_follow_each_other_test_every_environment() -> None:
    for every in (PAIRS, ADAPTERS):
        names = [str(one) for one in every]
        turns = range(7, 7 + -(-len(names) // PER_TURN))
        tested = [name for turn in turns for name in names_of_turn(names, turn)]
        assert set(tested) == set(names)


def test_limits_of_the_steps_of_ci_add_up_to_its_budget() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    budget = int(re.findall(r"^budget=(\d+)$", script, re.MULTILINE)[0])
    always = [int(limit) for limit in re.findall(r"^step (\d+) ", script, re.MULTILINE)]
    turns = [int(limit) for limit in re.findall(r"^    \d\) step (\d+) ", script, re.MULTILINE)]
    assert len(always) == 4
    assert len(turns) == 4
    assert sum(always) + max(turns) <= budget == 75 * 60
