"""Mutants of how ranks agree on a call, and of what asks for it."""

from __future__ import annotations

from .mutant import Mutant

_VOTER = ("tests/checkpoint/agreement/test_voter.py",)
_SIGNALS = ("tests/checkpoint/manager/test_signals.py",)

MUTANTS = (
    Mutant(
        name="ranks agree on a call that some have gone past",
        file="checkpoint/agreement/voter.py",
        old='"call": max(',
        new='"call": min(',
        tests=_VOTER,
    ),
    Mutant(
        name="ranks agree before all have voted",
        file="checkpoint/agreement/voter.py",
        old='if self._register.arrive(self._turn, "vote") == len(self._ranks):',
        new='if self._register.arrive(self._turn, "vote") >= 1:',
        tests=_VOTER,
    ),
    Mutant(
        name="a rank that is given up ends the turn in its own opinion only",
        file="checkpoint/agreement/voter.py",
        old="return self._register.move(self._turn, word, self._end_of(word, now - began))",
        new="return self._end_of(word, now - began)",
        tests=_VOTER,
    ),
    Mutant(
        name="what is asked twice before the agreed call is saved twice",
        file="checkpoint/agreement/voter.py",
        old="for r, t in self._requests.items() if not self._gate.is_due(r)}",
        new="for r, t in self._requests.items()}",
        tests=_VOTER,
    ),
    Mutant(
        name="a call slips through while it is being held",
        file="checkpoint/agreement/gate.py",
        old="            self._is_held, self._is_open = True, False\n",
        new="            self._is_held = True\n",
        tests=("tests/checkpoint/agreement/test_gate.py",),
    ),
    Mutant(
        name="a failure hides that the others save at this call",
        file="checkpoint/agreement/gate.py",
        old="        if agreed is None and error is not None:",
        new="        if error is not None:",
        tests=("tests/checkpoint/agreement/test_gate.py",),
    ),
    Mutant(
        name="forked processes keep the handlers of signals",
        file="checkpoint/manager/signals.py",
        old="os.register_at_fork(after_in_child=_forget_in_child)",
        new="",
        tests=_SIGNALS,
    ),
    Mutant(
        name="a handler that exits keeps the save from being made",
        file="checkpoint/manager/signals.py",
        old="            self.held = self.held or error",
        new="            raise",
        tests=_SIGNALS,
    ),
    Mutant(
        name="a handler that Python does not know of is replaced",
        file="checkpoint/manager/signals.py",
        old="            if _is_foreign(number):",
        new="            if False:",
        tests=_SIGNALS,
    ),
    Mutant(
        name="a save answers requests that came after it had begun",
        file="checkpoint/manager/demand.py",
        old="tuple(r for r in self.requests if r.id not in done)",
        new="()",
        tests=("tests/checkpoint/manager/test_demand.py",),
    ),
    Mutant(
        name="word of a group of another size is taken for word of this one",
        file="checkpoint/ranks/rendezvous.py",
        old="        if invitation.size != len(self._everyone):",
        new="        if False:",
        tests=("tests/checkpoint/ranks/test_rendezvous.py",),
    ),
)
