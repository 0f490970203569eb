"""Whether a call of ``save`` saves: by the step's number, or by what all ranks have agreed on."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..agreement.agreement import Agreement
from ..agreement.gate import Agreed
from .when import EverySteps, When, look_at_the_clock, rules_of

_MOST_PASSED = 10_000
"""Of more steps between two calls only the last ones are asked for, of rules of users."""


class Due:
    """The rules of a manager, and the agreement that those need that look at the clock."""

    def __init__(self, when: When | Iterable[When], agreement: Agreement | None) -> None:
        self._rules = rules_of(when)
        self._asks = look_at_the_clock(self._rules)
        self._agreement = agreement
        self._last = time.monotonic()
        self._asked = False
        self._step: int | None = None
        """Of the call before, or what was restored."""

    def is_due(self, step: int, *, is_durable: bool, is_first: bool) -> str | Agreed | None:
        """Return why this call is to save, None if it is not; the same on every rank.

        ``is_first`` is true on the rank that looks at the clock, ``is_durable`` says that no save
        is under way on it.
        """
        reason: str | Agreed | None = None
        before, self._step = self._step, step
        if self._agreement is not None:
            asked, self._asked = self._asked, False  # an error is an answer, too
            reason = self._agreement.at_call()
            self._asked = asked and reason is None
        if reason is None and any(_has_step(rule, before, step) for rule in self._rules):
            reason = f"step {step}"
        if self._agreement is None or not (is_first and self._asks) or self._asked or reason:
            return reason
        since_last = time.monotonic() - self._last
        if any(rule.is_time(since_last, is_durable=is_durable) for rule in self._rules):
            self._asked = True
            self._agreement.ask("the time has come")
        return None

    def restored(self, step: int) -> None:
        """Note which step the run goes on from."""
        self._step = step

    def begun(self) -> None:
        """Note that a save begins: from now on it is counted to the next one."""
        self._last, self._asked = time.monotonic(), False


def _has_step(rule: When, before: int | None, step: int) -> bool:
    """Whether a rule asks for a step after ``before``, up to this one.

    Loops that do not call at every step, as those that accumulate gradients, pass over some.
    """
    if before is None or before >= step:
        return rule.is_step(step)
    if isinstance(rule, EverySteps):
        return step // rule.steps > before // rule.steps
    return any(map(rule.is_step, range(max(before, step - _MOST_PASSED) + 1, step + 1)))
