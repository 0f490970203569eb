"""Mutants of what ranks say to each other."""

from __future__ import annotations

from .mutant import Mutant

_WIRES = ("tests/checkpoint/test_wires.py", "tests/checkpoint/test_frames.py")
_MEETING = ("tests/checkpoint/test_rendezvous.py",)

MUTANTS = (
    Mutant(
        name="half a frame may be followed by another",
        file="checkpoint/link.py",
        old="            self._broken = True\n            self._left.clear()\n            raise",
        new="            self._left.clear()\n            raise",
        tests=_WIRES,
    ),
    Mutant(
        name="a process that was itself stopped blames the others",
        file="checkpoint/wire.py",
        old="                if now - expected > 1.0:",
        new="                if False:",
        tests=_WIRES,
    ),
    Mutant(
        name="a stranger's token is not compared",
        file="checkpoint/greeting.py",
        old="if magic != _MAGIC or not hmac.compare_digest(token, self._token):",
        new="if magic != _MAGIC:",
        tests=_MEETING,
    ),
    Mutant(
        name="a rank that is stuck counts as getting on",
        file="checkpoint/wire.py",
        old="            held.heard[rank] -= age\n",
        new="",
        tests=_WIRES,
    ),
)
