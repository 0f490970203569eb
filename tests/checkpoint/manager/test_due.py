"""When a call of ``save`` saves, by the clock of one rank."""

from __future__ import annotations

import pytest

from dtckpt.checkpoint import Continuously
from dtckpt.checkpoint.agreement.agreement import Agreement
from dtckpt.checkpoint.agreement.gate import Agreed
from dtckpt.checkpoint.manager.due import Due
from dtckpt.errors import RankFailed

ALWAYS = {"is_durable": True, "is_first": True}


def test_the_clock_asks_again_until_a_save_has_begun() -> None:
    with Agreement() as agreement:
        due = Due(Continuously(), agreement)
        answers = [due.is_due(step, **ALWAYS) for step in range(6)]  # none of which saves
    assert [str(answer) for answer in answers] == ["None", "the time has come"] * 3


def test_the_clock_asks_once_while_there_is_no_answer() -> None:
    asked: list[str] = []

    class Slow(Agreement):
        def ask(self, reason: str, within: object = None) -> None:
            asked.append(reason)

    with Slow() as agreement:
        due = Due(Continuously(), agreement)
        assert [due.is_due(step, **ALWAYS) for step in range(3)] == [None] * 3
        assert len(asked) == 1
        due.begun()
        due.is_due(3, **ALWAYS)
    assert len(asked) == 2


def test_the_clock_asks_again_once_an_agreement_has_failed() -> None:
    class Failing(Agreement):
        def at_call(self) -> Agreed | None:
            found = super().at_call()
            if found is not None:
                raise RankFailed("rank 1 lost")
            return None

    with Failing() as agreement:
        due = Due(Continuously(), agreement)
        for step in (0, 2):
            assert due.is_due(step, **ALWAYS) is None
            with pytest.raises(RankFailed):
                due.is_due(step + 1, **ALWAYS)
